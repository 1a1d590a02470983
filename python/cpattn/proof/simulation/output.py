# SPDX-License-Identifier: Apache-2.0
"""What ranks print."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TextIO


class Turn(Protocol):
    """Whose turn it is."""

    @property
    def rank(self) -> int: ...
    def is_rank(self) -> bool: ...


@dataclass(frozen=True)
class Output:
    """Whether what ranks print is shown, and with the rank before each line."""

    quiet: bool = False
    prefix: bool = False

    @contextlib.contextmanager
    def of(self, turn: Turn, *, quiet: bool) -> Iterator[None]:
        """Show, or not, what is printed meanwhile; `quiet` for runs that repeat an earlier one."""
        if not (self.quiet or quiet or self.prefix):
            yield
            return
        hide = self.quiet or quiet
        streams = [_Lines(stream, turn, hide=hide) for stream in (sys.stdout, sys.stderr)]
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            yield
        for stream in streams:
            stream.finish()


class _Lines(io.TextIOBase):
    """Passes on whole lines, each with its rank."""

    def __init__(self, stream: TextIO, turn: Turn, *, hide: bool) -> None:
        self._stream, self._turn, self._hide = stream, turn, hide
        self._begun: dict[int, str] = {}

    def write(self, text: str) -> int:
        if not self._turn.is_rank():
            return self._stream.write(text)
        if not self._hide:
            rank = self._turn.rank
            *lines, rest = (self._begun.get(rank, "") + text).split("\n")
            self._begun[rank] = rest
            for line in lines:
                self._stream.write(f"[rank {rank}] {line}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def finish(self) -> None:
        """Lines without an end."""
        for rank, rest in sorted(self._begun.items()):
            if rest:
                self._stream.write(f"[rank {rank}] {rest}\n")
