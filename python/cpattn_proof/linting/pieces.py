# SPDX-License-Identifier: Apache-2.0
"""Ranges of queries whose visible keys grow linearly, call by call."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .intervals import Ints, each, ints
from .model import Columns, Plan, Undecided

MOST_MEETINGS = 2_000_000  # of calls and runs of rows; more would take gigabytes
_FAR = 2**41  # more keys than any call has


@dataclass(frozen=True)
class Pieces:
    """Ranges of queries and the keys they see; all fields are arrays.

    Query j of a piece is at ``position + j * stride``. It sees ``keys + j * slope`` keys; the first
    is at ``first + j * move``, and the next ones follow in steps of ``key_step``.
    """

    rank: Ints
    request: Ints
    position: Ints
    stride: Ints
    rows: Ints
    first: Ints
    move: Ints
    keys: Ints
    slope: Ints
    key_step: Ints
    source: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, which: Ints | NDArray[np.bool_]) -> Pieces:
        return Pieces(**{field.name: getattr(self, field.name)[which] for field in fields(self)})

    def __add__(self, other: Pieces) -> Pieces:
        both = {
            field.name: np.concatenate([getattr(self, field.name), getattr(other, field.name)])
            for field in fields(self)
        }
        return Pieces(**both)

    @property
    def pairs(self) -> NDArray[np.float64]:
        """Number of query-key pairs in each piece."""
        return self.rows * (self.keys + self.slope * (self.rows - 1) / 2)


def pieces_of(plan: Plan) -> Pieces:
    """Return all that attention computes, without padding rows."""
    found = _of_rows(plan)
    ring = found.source >= 0
    return without_empty_rows(found[~ring]) + _of_other_ranks(plan, found[ring])


def rows_of_segments(plan: Plan) -> tuple[Ints, Ints, Ints, Ints]:
    """Intersect segments with runs of rows: segment, run, and range among all rows."""
    rows, segments = plan.rows, plan.segments
    base = plan.row_base(rows)
    begins = base[segments["rank"]] + segments["row"]
    ends = np.minimum(begins + segments["rows"], base[segments["rank"] + 1])
    run_ends = rows["at"] + rows["count"]
    low = np.searchsorted(run_ends, begins, side="right")
    high = np.searchsorted(rows["at"], ends, side="left")
    segment, place = _each(np.maximum(high - low, 0))
    run = low[segment] + place
    begin = np.maximum(begins[segment], rows["at"][run])
    end = np.minimum(ends[segment], run_ends[run])
    real = begin < end
    return segment[real], run[real], begin[real], end[real]


def _each(counts: Ints) -> tuple[Ints, Ints]:
    """Run `each`; `Undecided` for too many members."""
    if int(counts.sum()) > MOST_MEETINGS:
        raise Undecided(f"calls and runs of rows meet more than {MOST_MEETINGS:,} times")
    return each(counts)


def _of_rows(plan: Plan) -> Pieces:
    """Return calls, cut where a window begins to hide keys and where it reaches the last key."""
    rows, segments = plan.rows, plan.segments
    segment, run, begin, end = rows_of_segments(plan)
    own = rows["request"][run] == segments["request"][segment]
    segment, run, begin, end = segment[own], run[own], begin[own], end[own]
    call = {name: values[segment] for name, values in segments.items()}
    into = begin - (plan.row_base(rows)[segments["rank"]] + segments["row"])[segment]
    count, step = end - begin, np.maximum(call["step"], 1)
    causal = call["step"] > 0
    stop = call["first"] + call["keys"]
    after = stop - (call["rows"] - 1 - into) * step  # one past the first row's own key
    low = after - 1 - np.minimum(call["window"], _FAR)
    high = after + np.where(causal, 0, np.minimum(call["window_right"], _FAR))
    hides = np.where(call["window"] >= 0, _reached(low, step, call["first"], count), count)
    full = np.where(call["window_right"] >= 0, _reached(high, step, stop, count), 0)
    full = np.where(causal, count, full)
    piece, skipped, rest = _between(hides, full, count)
    moves, grows = skipped >= hides[piece], skipped < full[piece]
    step = step[piece]
    first = np.where(moves, low[piece] + skipped * step, call["first"][piece])
    last = np.where(grows, high[piece] + skipped * step, stop[piece])
    run, position = run[piece], begin[piece] - rows["at"][run[piece]] + skipped
    return Pieces(
        rank=call["rank"][piece],
        request=call["request"][piece],
        position=rows["position"][run] + position * rows["step"][run],
        stride=rows["step"][run],
        rows=rest,
        first=first,
        move=np.where(moves, step, 0),
        keys=last - first,
        slope=np.where(causal[piece], call["step"][piece], np.where(grows, step, 0))
        - np.where(moves, step, 0),
        key_step=np.ones(len(piece), np.int64),
        source=call["from"][piece],
    )


def _reached(value: Ints, slope: Ints, target: Any, rows: Ints) -> Ints:
    """Return the first row at which a value that grows by `slope` reaches `target`, or `rows`."""
    at = -(-(target - value) // np.maximum(slope, 1))
    at = np.where(slope > 0, at, np.where(value >= target, 0, rows))
    return ints(np.clip(at, 0, rows))


def _between(*points: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ranges of rows between cut points of each piece, whose last point is its end.

    The result has piece, first row, and number of rows of each non-empty range.
    """
    edges = np.sort(np.stack([np.zeros_like(points[-1]), *points]), axis=0)
    begin, rows = edges[:-1].ravel(), np.diff(edges, axis=0).ravel()
    piece = np.tile(np.arange(len(points[-1])), len(points))
    real = rows > 0
    return piece[real], begin[real], rows[real]


def _of_other_ranks(plan: Plan, pieces: Pieces) -> Pieces:
    """Convert keys that are rows of ranks, in their order, to positions."""
    if not len(pieces):
        return pieces
    runs, order_key = _key_runs(plan)
    wanted = pieces.source * len(plan.requests) + pieces.request
    low = np.searchsorted(order_key, wanted, side="left")
    high = np.searchsorted(order_key, wanted, side="right")
    piece, place = _each(high - low)
    run = low[piece] + place
    whole, size = pieces[piece], runs["count"][run]
    begin = whole.first - runs["offset"][run]  # of the first query, within the run
    end, end_slope = begin + whole.keys, whole.move + whole.slope
    # Between these rows, each end of the range stays before, within or after the run.
    piece, row, rows = _between(
        _reached(begin, whole.move, 0, whole.rows),
        _reached(begin, whole.move, size, whole.rows),
        _reached(end, end_slope, 0, whole.rows),
        _reached(end, end_slope, size, whole.rows),
        whole.rows,
    )
    whole, size, step = whole[piece], size[piece], runs["step"][run][piece]
    begin = begin[piece] + row * whole.move
    end = end[piece] + row * end_slope[piece]
    begin_slope = np.where((begin >= 0) & (begin < size), whole.move, 0)
    end_slope = np.where((end >= 0) & (end < size), end_slope[piece], 0)
    begin, end = np.clip(begin, 0, size), np.clip(end, 0, size)
    found = replace(
        whole,
        position=whole.position + row * whole.stride,
        rows=rows,
        first=runs["position"][run][piece] + begin * step,
        move=begin_slope * step,
        keys=end - begin,
        slope=end_slope - begin_slope,
        key_step=step,
    )
    return without_empty_rows(found)


def _key_runs(plan: Plan) -> tuple[Columns, Ints]:
    """Return runs by rank and request, with the number of keys before each; and the sort keys."""
    rows = plan.rows
    real = np.flatnonzero(rows["request"] >= 0)
    group = rows["rank"][real] * len(plan.requests) + rows["request"][real]
    order = np.argsort(group, kind="stable")
    runs = {name: values[real][order] for name, values in rows.items()}
    group = group[order]
    before = np.cumsum(runs["count"]) - runs["count"]
    starts = np.searchsorted(group, group, side="left")
    runs["offset"] = before - before[starts] if len(group) else ints([])
    return runs, group


def without_empty_rows(pieces: Pieces) -> Pieces:
    """Drop the first queries of pieces that see no key yet."""
    slope = np.maximum(pieces.slope, 1)
    skipped = np.where(pieces.slope > 0, -(-(1 - pieces.keys) // slope), pieces.rows)
    skipped = ints(np.where(pieces.keys > 0, 0, np.clip(skipped, 0, pieces.rows)))
    trimmed = replace(
        pieces,
        position=pieces.position + skipped * pieces.stride,
        rows=pieces.rows - skipped,
        first=pieces.first + skipped * pieces.move,
        keys=pieces.keys + skipped * pieces.slope,
    )
    return trimmed[trimmed.rows > 0]
