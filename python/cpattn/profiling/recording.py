# SPDX-License-Identifier: Apache-2.0
"""Recordings of the threads of this process: events, taken from the core."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from .. import _core
from .._core import TraceScope
from .._limits import check_integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EVENTS = 1 << 26
_RECORD = np.dtype((np.void, 40))  # one event of a thread

_Itself = TypeVar("_Itself", bound="Recording")


class Thread(NamedTuple):
    """Thread that recorded events.

    Examples
    --------
    >>> Thread(name="cpattn-1", id=4711, dropped=0).name
    'cpattn-1'
    """

    name: str
    id: int  # of the operating system
    dropped: int  # events that did not fit into its buffer


Thread.__module__ = "cpattn.profiling"


class Recording:
    """Events of a with block; see the attributes of its subclass `Profile`."""

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events

    def __enter__(self: _Itself) -> _Itself:
        try:  # a thread without memory for its events would be missing from the trace
            np.empty(self._max_events, _RECORD)
        except MemoryError:
            raise MemoryError(
                f"profile: no memory for max_events = {self._max_events} of a thread"
            ) from None
        _core.start_trace(self._max_events)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        nanoseconds, events, threads, self.functions = _core.stop_trace()
        self.seconds = nanoseconds / 1e9
        self.threads = [Thread(*thread) for thread in threads]
        self.events: NDArray[np.void] = events[np.argsort(events["begin"], kind="stable")]
        self.peaks = {} if error else _measured_peaks(self.events)
        vars(self).pop("_summary", None)  # of an earlier block

    def __getattr__(self, name: str) -> Any:
        if "events" not in vars(self):
            name = name.lstrip("_")
            raise AttributeError(f"profile: {name} is there when the with block has ended")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def calls(self) -> int:
        """Number of calls that ended."""
        return int((self.events["scope"] == TraceScope.call).sum())

    @property
    def dropped(self) -> int:
        """Number of events that did not fit into the buffer of their thread."""
        return sum(thread.dropped for thread in self.threads)

    def select(self, scope: TraceScope, thread: int | None = None) -> NDArray[np.void]:
        """Return the events of a scope, on one thread (by index) or on all."""
        if not isinstance(scope, TraceScope):
            raise TypeError(f"select: scope must be a TraceScope, got {type(scope).__name__}")
        if thread is not None:
            check_integer("select", "thread", thread, 0, len(self.threads) - 1)
        chosen = self.events["scope"] == scope
        if thread is not None:
            chosen &= self.events["thread"] == thread
        return self.events[chosen]


def _measured_peaks(events: NDArray[np.void]) -> dict[int, float]:
    peaks = {}
    for dtype in np.unique(events["dtype"][events["flops"] > 0]):
        users = events["thread"][(events["dtype"] == dtype) & (events["flops"] > 0)]
        threads = len(np.unique(users))
        peaks[int(dtype)] = _core.measure_peak(_core.dtype_name(int(dtype)), threads) / threads
    return peaks
