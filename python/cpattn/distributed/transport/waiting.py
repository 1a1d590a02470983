# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way between ranks, and the wait for them."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

Works = list[tuple[int, Any]]  # of a backend, each with the rank at its other end

_A_MOMENT = 0.1  # seconds
# Waits whose call has ended before them.
_ABANDONED: WeakSet[Wait] = WeakSet()
# A thread that comes out of a backend while the interpreter ends takes the process down with an
# abort: one that would come within so many seconds is awaited. Later there is no process.
_OF_AN_EXIT = 2.0


@dataclass
class Posted:
    """Tensors on their way, which must stay as they are until `RowExchange.finish`."""

    call: str
    works: Works = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)  # kept until then


class Wait:
    """Waits for all works, in a thread: Ctrl-C ends a join, but no wait of a backend.

    Works that say of themselves that they wait in the thread of their rank are waited for there.

    A rank that has failed is not waited for again. gloo does not see that one has died whose rows
    are arriving: the thread lives on until `longest` then, where the call ends for another reason.

    Parameters
    ----------
    posted
        What is awaited; failures are noted there.
    longest : float or None
        Seconds for all works, where the backend takes that.
    """

    def __init__(self, posted: Posted, longest: float | None) -> None:
        self.posted = posted
        self.begin = time.monotonic()
        self.awaited = -1  # the first rank whose rows are not there
        self._longest = longest
        self._thread = threading.Thread(target=self._run, daemon=True)
        if any(getattr(work, "waits_in_own_thread", False) for _, work in posted.works):
            self._run()
        else:
            self._thread.start()

    def _run(self) -> None:
        for rank, work in self.posted.works:
            if rank not in self.posted.failures:
                self.awaited = rank
                with noting(self.posted.failures, rank, Exception):
                    if self._longest is None:
                        work.wait()
                    else:
                        work.wait(timedelta(seconds=max(self.seconds_left(), 0.001)))

    def seconds_left(self) -> float:
        """Until it is over in any case, where the backend takes that."""
        longest = float("inf") if self._longest is None else self._longest
        return self.begin + longest - time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait, for so long at most."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def is_over(self) -> bool:
        """Whether all is there, or has failed."""
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Let it end by itself, as its connections are closed; wait where that is soon."""
        left = self.seconds_left()
        self.join(left + _A_MOMENT if left < 1 else _A_MOMENT)
        if not self.is_over():
            _ABANDONED.add(self)


@contextlib.contextmanager
def noting(failures: dict[int, Exception], rank: int, kind: type[Exception]) -> Iterator[None]:
    """Errors of this kind are the rank's; others, such as of memory, are this rank's own."""
    try:
        yield
    except kind as error:
        failures.setdefault(rank, error)


@atexit.register
def _join_abandoned() -> None:
    for wait in list(_ABANDONED):
        left = wait.seconds_left()
        if left < _OF_AN_EXIT:
            wait.join(left + _A_MOMENT)
