# SPDX-License-Identifier: Apache-2.0
"""Handles of calls in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .calls import Call


class SimulatedWork(dist.Work):
    """Handle of a call in flight.

    Parameters
    ----------
    call : Call
        The call.
    wait : callable
        Returns once the call is complete and its outputs are filled.
    poll : callable
        Tells whether the call is complete, after other ranks had a turn.
    """

    #: Ctrl-C ends a wait, but only in the thread of the rank.
    waits_in_own_thread = True

    def __init__(self, call: Call, wait: Callable[[Call], None], poll: Callable[[Call], bool]):
        super().__init__()
        self._outputs = call.outputs  # the call drops its own list
        self._call, self._wait, self._poll = call, wait, poll

    def wait(self, timeout: Any = None) -> bool:
        self._wait(self._call)
        return True

    def is_completed(self) -> bool:
        return self._poll(self._call)

    def is_success(self) -> bool:
        return self._call.delivered

    def synchronize(self) -> None:
        self._wait(self._call)

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        self._wait(self._call)
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank of the group that sent a message."""
        return self._call.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a finished future: C++ waits for one without letting other ranks run."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future
