# SPDX-License-Identifier: Apache-2.0
"""Timeline of a profile: a lane for each thread, filled with its scopes over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .._core import TraceScope
from .recording import Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEPS = 1000
_LANE = 0.82  # height of a lane whose thread is always busy
# Okabe and Ito's colours, distinct for colour-blind readers.
_COLORS = {
    TraceScope.qk: "#0072b2",
    TraceScope.softmax: "#e69f00",
    TraceScope.pv: "#56b4e9",
    TraceScope.pack: "#009e73",
    TraceScope.write: "#f0e442",
    TraceScope.merge: "#d55e00",
    TraceScope.gather: "#cc79a7",
    TraceScope.plan: "#7a4fa3",
    TraceScope.wait: "#d5dade",
}
_INK = "#3c4650"


def draw(recording: Recording, begin: float | None, end: float | None) -> Any:
    """Draw the figure of `Profile.timeline`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    edges = np.linspace(*_range(recording, begin, end), _STEPS + 1)
    lanes = len(recording.threads)
    figure = Figure(figsize=(10, min(12.0, 1.2 + 0.55 * max(lanes, 1))), layout="constrained")
    axes = figure.add_subplot()
    seen = set()
    for thread in range(lanes):
        base = np.full(_STEPS, lanes - 1.0 - thread)
        for scope, color in _COLORS.items():
            busy = _share_of_steps(recording.select(scope, thread), edges)
            if busy.any():
                top = base + _LANE * busy
                axes.fill_between(
                    edges[:-1] * 1e3, base, top, step="post", color=color, linewidth=0
                )
                seen.add(scope)
                base = top
    _mark_calls(axes, recording, edges)
    axes.set_yticks(
        [lanes - 1 - thread + _LANE / 2 for thread in range(lanes)],
        [f"{thread.name}\n{thread.id}" for thread in recording.threads],
    )
    axes.set_xlim(edges[0] * 1e3, edges[-1] * 1e3)
    axes.set_ylim(-0.08, max(lanes, 1) + 0.1)
    axes.set_xlabel("time since the profile began [ms]")
    axes.tick_params(colors=_INK, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    keys = [Patch(color=c, label=scope.name) for scope, c in _COLORS.items() if scope in seen]
    if keys:
        figure.legend(
            handles=keys, loc="outside upper left", ncols=len(keys), frameon=False, fontsize=9
        )
    return figure


def _range(recording: Recording, begin: float | None, end: float | None) -> tuple[float, float]:
    events = recording.events
    first, last = (events["begin"].min(), events["end"].max()) if len(events) else (0, 1)
    left = first / 1e9 if begin is None else begin
    right = last / 1e9 if end is None else end
    if not left < right:
        raise ValueError(f"timeline: begin must be before end, got {left} and {right}")
    if not np.isfinite([left, right]).all():
        raise ValueError(f"timeline: begin and end must be finite, got {left} and {right}")
    return left, right


def _share_of_steps(events: NDArray[np.void], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the fraction [steps] of each step that the events cover; events do not overlap."""
    events = events[np.argsort(events["begin"], kind="stable")]
    times = np.stack([events["begin"], events["end"]], axis=1).ravel() / 1e9
    covered = np.zeros_like(times)
    covered[1::2] = np.diff(times)[::2]
    covered = np.cumsum(covered)
    if not len(times):
        return np.zeros(len(edges) - 1)
    share = np.diff(np.interp(edges, times, covered)) / np.diff(edges)
    return np.clip(share, 0.0, 1.0)


def _mark_calls(axes: Any, recording: Recording, edges: NDArray[np.float64]) -> None:
    """Draw a line at the begin of each call, with its name if there is room."""
    calls = recording.select(TraceScope.call)
    begins = calls["begin"] / 1e9
    inside = (begins >= edges[0]) & (begins < edges[-1])
    if not 0 < inside.sum() <= 40:
        return
    top = len(recording.threads) - 1 + _LANE
    axes.vlines(begins[inside] * 1e3, 0, top + 0.15, color=_INK, linewidth=0.6)
    if inside.sum() <= 4:
        for begin, function in zip(begins[inside], calls["function"][inside], strict=True):
            axes.annotate(
                recording.functions[function], (begin * 1e3, top + 0.07), xytext=(3, 0),
                textcoords="offset points", fontsize=8, color=_INK,
            )  # fmt: skip
