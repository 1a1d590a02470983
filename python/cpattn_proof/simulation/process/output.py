# SPDX-License-Identifier: Apache-2.0
"""Output of ranks."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class Turn(Protocol):
    """Interface of the ranks' turns; one rank runs at a time."""

    @property
    def rank(self) -> int: ...
    def is_rank(self) -> bool: ...


@dataclass(frozen=True)
class Output:
    """Printed text of ranks: whether it is shown, and with the rank before each line."""

    quiet: bool = False
    prefix: bool = False

    @contextlib.contextmanager
    def of(self, turn: Turn, *, quiet: bool) -> Iterator[None]:
        """Show or hide text printed in the block; `quiet` hides runs that repeat an earlier one."""
        if not (self.quiet or quiet or self.prefix):
            yield
            return
        hide = self.quiet or quiet
        streams = [_Lines(name, turn, hide=hide) for name in ("stdout", "stderr")]
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                yield
            finally:
                for stream in streams:
                    stream.finish()


class _Bytes(io.RawIOBase):
    """Binary stream of programs, written between the lines."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data)
        self._lines.write(text.decode(self._lines.encoding, "replace"))
        return len(text)


class _Lines(io.TextIOBase):
    """Passes on whole lines, each with its rank."""

    def __init__(self, name: str, turn: Turn, *, hide: bool) -> None:
        self._name, self._stream = name, getattr(sys, name)
        self._turn, self._hide = turn, hide
        self._begun: dict[int, str] = {}
        self._is_over = False
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        if self._is_over:  # a handler of logging keeps this stream in later runs
            following = getattr(sys, self._name)
            return int((self._stream if following is self else following).write(text))
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

    def fileno(self) -> int:
        return self._stream.fileno()

    def reconfigure(self, **_: object) -> None:
        """Ignore options, as whole lines are passed on in any case."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def finish(self) -> None:
        """Write unfinished lines; later text goes to the output of its time."""
        self._is_over = True
        for rank, rest in sorted(self._begun.items()):
            if rest:
                self._stream.write(f"[rank {rank}] {rest}\n")
