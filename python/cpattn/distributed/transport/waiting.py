# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way between ranks, and the wait for them."""

from __future__ import annotations

import atexit
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from .timeouts import EXIT

Works = list[tuple[int, Any]]  # of a backend, each with the rank at its other end

_A_MOMENT = 0.1  # seconds
# The last number of a message that has not come yet: no digest, length or flag that a rank sends.
NOT_YET = int.from_bytes(b"not yet?", "little")
# Seconds to look for messages without a thread: at every turn of this process at first, so that an
# answer costs no sleep, then a few times a millisecond, so that ranks that compute have the CPU.
_EAGER, _PATIENT, _NAP = 0.0001, 0.002, 0.00005
# Waits whose call has ended before them.
_ABANDONED: WeakSet[Wait] = WeakSet()


@dataclass
class Posted:
    """Tensors on their way, which must stay as they are until `RowExchange.finish`.

    Messages may have `ends`: their last numbers, NOT_YET until they are there. Each rank that one
    comes from, and no other, is sent one: its own comes behind its call for that, which then is on
    its way, too.
    """

    call: str
    works: Works = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)  # kept until then
    ends: np.ndarray[Any, Any] | None = None


def have_come(ends: np.ndarray[Any, Any] | None) -> bool:
    """Look for messages by their ends, for two milliseconds; without them, do not.

    A thread costs more than most of these waits: one is worth it for what takes longer.
    """
    if ends is None:
        return False
    begin = time.monotonic()
    while NOT_YET in ends.tolist():
        waited = time.monotonic() - begin
        if waited > _PATIENT:
            return False
        if waited < _EAGER:
            os.sched_yield()
        else:
            time.sleep(_NAP)
    return True


class Wait:
    """Waits for all works, in a thread: Ctrl-C ends a join, but no wait of a backend.

    Works that are over soon are waited for in the calling thread, and so are those that say of
    themselves that they wait in the thread of their rank.

    A rank that has failed is not waited for again. gloo does not see that one has died whose rows
    are arriving: the thread lives on until `longest` then, where the call ends for another reason.

    Parameters
    ----------
    posted
        What is awaited; failures are noted there.
    longest : float or None
        Seconds for all works, where the backend takes that.
    over_soon : bool
        Whether what was sent to this rank is there.
    """

    def __init__(self, posted: Posted, longest: float | None, *, over_soon: bool = False) -> None:
        self.posted = posted
        self.begin = time.monotonic()
        self.awaited = -1  # the first rank whose rows are not there
        self._longest = longest
        self._thread: threading.Thread | None = None
        if over_soon or any(
            getattr(work, "waits_in_own_thread", False) for _, work in posted.works
        ):
            self._run()
        else:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        for rank, work in self.posted.works:
            if rank in self.posted.failures:
                continue
            self.awaited = rank
            try:
                if self._longest is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(self.seconds_left(), 0.001)))
            except Exception as error:
                self.posted.failures.setdefault(rank, error)

    def seconds_left(self) -> float:
        """Return the seconds that are left of `longest`; infinity where there is no such limit."""
        longest = float("inf") if self._longest is None else self._longest
        return self.begin + longest - time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait, for so long at most."""
        if self._thread is not None:
            self._thread.join(seconds)

    def is_over(self) -> bool:
        """Whether all is there, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def abandon(self) -> None:
        """Let it end by itself, as its connections are closed; wait where that is soon."""
        left = self.seconds_left()
        self.join(left + _A_MOMENT if left < 1 else _A_MOMENT)
        if not self.is_over():
            _ABANDONED.add(self)


@atexit.register
def _join_abandoned() -> None:
    for wait in list(_ABANDONED):
        left = wait.seconds_left()
        if left < EXIT:
            wait.join(left + _A_MOMENT)
