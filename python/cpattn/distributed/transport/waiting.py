# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way between ranks, and waits for them."""

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

Works = list[tuple[int, Any]]  # works of a backend, each with its peer rank

_A_MOMENT = 0.1  # seconds
# Placeholder for the last number of a message to come: no digest, length or flag has it.
NOT_YET = int.from_bytes(b"not yet?", "little")
# Seconds to poll for messages without a thread: first at every turn of this process, so an answer
# costs no sleep, then a few times per millisecond, so ranks that compute have the CPU.
_EAGER, _PATIENT, _NAP = 0.0001, 0.002, 0.00005
# Waits that outlived their call.
_ABANDONED: WeakSet[Wait] = WeakSet()


@dataclass
class Posted:
    """Tensors on their way, which must not change until `RowExchange.finish`.

    Messages may have `ends`: their last numbers, NOT_YET until they arrive. With ends, a rank
    sends a message to exactly the ranks from which one comes. It posts its receives before it
    sends: once its message is here, the message to it is on its way, too.
    """

    call: str
    works: Works = field(default_factory=list)
    failures: dict[int, Exception] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)  # kept until then
    ends: np.ndarray[Any, Any] | None = None


def have_come(ends: np.ndarray[Any, Any] | None) -> bool:
    """Poll for messages by their ends, for two milliseconds; skip without ends.

    A thread costs more than most of these waits, and pays only for longer ones.
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
    """Wait for all works in a thread: Ctrl-C ends a join, but not a wait of a backend.

    The calling thread waits itself for works that end soon, and for works that wait in the thread
    of their rank anyway.

    A failed rank is not waited for again. gloo does not notice the death of a rank whose rows are
    arriving: the thread then lives until `longest`, if the call ends for another reason.

    Parameters
    ----------
    posted
        Awaited tensors; failures are noted there.
    longest : float or None
        Seconds for all works, if the backend takes a limit.
    over_soon : bool
        Whether the rows sent to this rank have arrived.
    """

    def __init__(self, posted: Posted, longest: float | None, *, over_soon: bool = False) -> None:
        self.posted = posted
        self.begin = time.monotonic()
        self.awaited = -1  # the first rank whose rows are missing
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
        """Return the seconds left of `longest`; infinity without a limit."""
        longest = float("inf") if self._longest is None else self._longest
        return self.begin + longest - time.monotonic()

    def join(self, seconds: float) -> None:
        """Wait for at most `seconds`."""
        if self._thread is not None:
            self._thread.join(seconds)

    def is_over(self) -> bool:
        """Tell whether every work has arrived or failed."""
        return self._thread is None or not self._thread.is_alive()

    def abandon(self) -> None:
        """Leave the thread to end with its connections; wait if that is soon."""
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
