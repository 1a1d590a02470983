# SPDX-License-Identifier: Apache-2.0
"""Profiler: ``with cpattn.profile() as trace:`` measures the time of the block by scope."""

from __future__ import annotations

import html
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._core import TraceScope
from .._limits import check_integer
from .recording import MAX_EVENTS, Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Scopes that exclude each other on a thread; items and calls enclose them.
_LEAVES = [scope for scope in TraceScope if scope < TraceScope.item]


def profile(*, max_events: int = 1 << 20) -> Profile:
    """Record what the threads of cpattn do inside a with block.

    Parameters
    ----------
    max_events : int
        Most events of one thread, at 40 bytes each, at most 2**26. Attention makes about 400 events
        per millisecond and thread. Further events are dropped; `Profile.dropped` counts them, and a
        warning reports them.

    Returns
    -------
    Profile
        Empty until the block ends. Its end measures the speed of the machine, about 0.1 s for each
        dtype that was multiplied.

    Raises
    ------
    MemoryError
        On entry, if there is no memory for the events of a thread.
    RuntimeError
        On entry, if another profile of this process is running. Profiles neither nest nor run side
        by side; the running one has the calls of all threads.

    Notes
    -----
    An event reads the clock and stores, about 60 ns: 2 to 4 % of the time of attention. Outside of
    a profile nothing is recorded, and a scope costs one test.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q = np.ones((64, 2, 16), np.float32)
    >>> cache = np.ones((4, 16, 1, 16), np.float32)
    >>> with cpattn.profile() as trace:
    ...     out = cpattn.paged_attention(q, cache, cache, q_lens=[64], kv_lens=[64],
    ...                                  block_tables=[[2, 0, 1, 3]])
    >>> [row.scope for row in trace.summary() if row.flops]
    ['qk', 'pv', 'total']
    """
    check_integer("profile", "max_events", max_events, 1, MAX_EVENTS)
    return Profile(max_events)


class ScopeTime(NamedTuple):
    """Time and flops of one scope in a profile, over all threads.

    Examples
    --------
    >>> row = ScopeTime("qk", events=8, seconds=0.5, share=0.25, flops=10**9, peak=0.8)
    >>> row.flops / row.seconds     # flop/s, of all threads together
    2000000000.0
    """

    scope: str
    events: int  # number of events; for the total, of calls
    seconds: float  # summed over threads
    share: float  # fraction of the total
    flops: int  # computed flops for qk and pv, useful flops for the total
    peak: float | None  # flops over the peak flops of these threads in this time


class Profile(Recording):
    """Recording of the threads of this process, made by `profile`.

    Attributes
    ----------
    events : structured array [events]
        ``begin`` and ``end`` (int64, ns since the block began), ``flops`` (int64), ``scope`` (a
        `TraceScope`), ``thread`` (index into `threads`), ``function`` (index into `functions`, 0:
        none), ``dtype`` (of the flops; see `peaks`), sorted by ``begin``. Flops of qk and pv count
        all computed scores; flops of an item count only visible scores. With AMX, softmax runs
        beside Q K^T and is part of qk.
    threads : list of Thread
    functions : list of str
    seconds : float
        Length of the block.
    peaks : dict of int to float
        Flop/s of one thread while all threads multiply, by dtype.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q, cache = np.ones((8, 2, 16), np.float32), np.ones((1, 8, 1, 16), np.float32)
    >>> with cpattn.profile() as trace:
    ...     out = cpattn.paged_attention(q, cache, cache, q_lens=[8], kv_lens=[8],
    ...                                  block_tables=[[0]])
    >>> trace.calls, trace.dropped, len(trace.select(cpattn.profiling.TraceScope.call))
    (1, 0, 1)
    """

    def __repr__(self) -> str:
        if "events" not in vars(self):
            return "<cpattn profile that has not ended>"
        return (
            f"<cpattn profile of {_time(self.seconds)}: {self.calls} calls, "
            f"{len(self.threads)} threads, {len(self.events)} events{self._dropped_note()}>"
        )

    @cached_property
    def _summary(self) -> list[ScopeTime]:
        total = sum(_covered(self.events[self.events["thread"] == t]) for t in self._indices)
        rows = []
        for scope in _LEAVES:
            events = self.select(scope)
            # That no thread waited is an answer, too.
            if len(events) or scope == TraceScope.wait:
                rows.append(self._scope_time(scope.name, len(events), _lengths(events), events))
        other = total - sum(row.seconds for row in rows)
        nothing = self.events[:0]
        rows.append(self._scope_time("other", 0, other, nothing))
        items = self.select(TraceScope.item)
        rows.append(self._scope_time("total", self.calls, total, items))
        return [row._replace(share=row.seconds / total if total else 0.0) for row in rows]

    def summary(self) -> list[ScopeTime]:
        """Return times by scope, of waiting, of the rest ("other"), and of all ("total").

        The total is the time that threads spent in calls, summed over threads; it counts useful
        flops. "other" is the time outside of all scopes: setting up items, clearing rows, checks.
        """
        return list(self._summary)

    def _scope_time(
        self, scope: str, number: int, seconds: float, events: NDArray[np.void]
    ) -> ScopeTime:
        ideal = sum(
            int(events["flops"][events["dtype"] == dtype].sum()) / peak
            for dtype, peak in self.peaks.items()
        )
        flops = int(events["flops"].sum())
        return ScopeTime(
            scope, number, seconds, 0.0, flops, ideal / seconds if ideal and seconds else None
        )

    @property
    def _indices(self) -> range:
        return range(len(self.threads))

    def _title(self) -> str:
        names = self.select(TraceScope.call)["function"]
        calls = ", ".join(
            f"{count} × {self.functions[index]}"
            for index, count in zip(*np.unique(names, return_counts=True), strict=True)
        )
        peaks = ", ".join(
            f"{_core.dtype_name(dtype)} peak {peak / 1e9:,.0f} GFLOP/s per thread"
            for dtype, peak in self.peaks.items()
        )
        parts = [calls, f"{_time(self.seconds)}, {len(self.threads)} threads", peaks]
        return "; ".join(part for part in parts if part)

    def _dropped_note(self) -> str:
        return f", {self.dropped} more dropped: raise max_events" if self.dropped else ""

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.scope,
                "" if row.scope == "other" else f"{row.events:,}",
                _time(row.seconds),
                f"{row.share:.1%}",
                f"{row.flops / row.seconds / 1e9:,.0f}" if row.flops and row.seconds else "",
                f"{row.peak:.0%}" if row.peak else "",
            ]
            for row in self._summary
        ]

    def table(self) -> Any:
        """Return the summary as a ``rich`` table, for a terminal or a notebook."""
        table = _needed("rich.table").Table(
            title=self._title() + self._dropped_note(), caption=_CAPTION
        )
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name == "scope" else "right")
        cells = self._cells()
        for row in cells[:-1]:
            table.add_row(*row)
        table.add_section()
        table.add_row(*cells[-1], style="bold")
        return table

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in self._cells()
        )
        title = html.escape(self._title() + self._dropped_note())
        return (
            f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead>"
            f"<tbody>{rows}</tbody><tfoot><tr><td colspan={len(_COLUMNS)}>{_CAPTION}</td></tr>"
            "</tfoot></table>"
        )

    def timeline(self, begin: float | None = None, end: float | None = None) -> Any:
        """Draw a figure with a lane for each thread that shows its scopes over time.

        Parameters
        ----------
        begin, end : float, optional
            Range in seconds since the with block began. Default: from the first event to the last.
            The drawing has 1000 steps; within a step, a lane shows the mix of shorter events.

        Returns
        -------
        matplotlib.figure.Figure
        """
        _needed("matplotlib")
        from .timeline import draw

        return draw(self, begin, end)

    def plot(
        self, path: str | Path, *, begin: float | None = None, end: float | None = None
    ) -> None:
        """Write `timeline` to an image file; the suffix selects the format."""
        self.timeline(begin, end).savefig(path, dpi=150)

    def save(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev and chrome://tracing."""
        from .chrome_trace import write

        write(self, path)


ScopeTime.__module__ = Profile.__module__ = "cpattn.profiling"

_COLUMNS = ("scope", "events", "time", "share", "GFLOP/s per thread", "of peak")
_CAPTION = (
    "Times are summed over threads. qk and pv count the flops they compute, the total only those "
    "of visible scores."
)


def _lengths(events: NDArray[np.void]) -> float:
    return float((events["end"] - events["begin"]).sum()) / 1e9


def _covered(events: NDArray[np.void]) -> float:
    """Return the seconds covered by at least one event; events are sorted by begin."""
    if not len(events):
        return 0.0
    reached = np.maximum.accumulate(events["end"])
    gaps = np.maximum(events["begin"][1:] - reached[:-1], 0).sum()
    return float(reached[-1] - events["begin"][0] - gaps) / 1e9


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def _needed(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"profile: {error.name} is not installed; pip install 'cpattn[profile]' brings it",
            name=error.name,
        ) from None
