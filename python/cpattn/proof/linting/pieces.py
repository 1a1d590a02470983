# SPDX-License-Identifier: Apache-2.0
"""What queries see of keys, call by call, in ranges of queries whose keys grow evenly."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from .intervals import Ints, each, ints
from .model import Absent, Columns, Plan

MOST_MEETINGS = 10_000_000  # of a call and a run of rows; more would not fit into memory


@dataclass(frozen=True)
class Pieces:
    """Ranges of queries and the keys they see; all fields are arrays.

    Query j of a piece is at ``position + j * stride``, and sees ``keys + j * slope`` keys at
    ``first``, ``first + key_step``, ...
    """

    rank: Ints
    request: Ints
    position: Ints
    stride: Ints
    rows: Ints
    first: Ints
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
        """Pairs of a query and a key in each piece."""
        return self.rows * (self.keys + self.slope * (self.rows - 1) / 2)


def pieces_of(plan: Plan) -> Pieces:
    """All that attention computes, but for rows of padding."""
    found = _of_rows(plan)
    ring = found.source >= 0
    return without_empty_rows(found[~ring]) + _of_other_ranks(plan, found[ring])


def rows_of_segments(plan: Plan) -> tuple[Ints, Ints, Ints, Ints]:
    """Where segments and runs of rows meet: segment, run, and the range of rows among all."""
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
    """`each`, of not too many members."""
    if int(counts.sum()) > MOST_MEETINGS:
        raise Absent(f"calls and runs of rows meet more than {MOST_MEETINGS:,} times")
    return each(counts)


def _of_rows(plan: Plan) -> Pieces:
    rows, segments = plan.rows, plan.segments
    segment, run, begin, end = rows_of_segments(plan)
    base = plan.row_base(rows)
    into = begin - (base[segments["rank"]] + segments["row"])[segment]
    slope = segments["step"][segment]
    behind = segments["rows"][segment] - 1 - into
    found = Pieces(
        rank=segments["rank"][segment],
        request=segments["request"][segment],
        position=rows["position"][run] + (begin - rows["at"][run]) * rows["step"][run],
        stride=rows["step"][run],
        rows=end - begin,
        first=segments["first"][segment],
        keys=segments["keys"][segment] - behind * slope,
        slope=slope,
        key_step=np.ones(len(segment), np.int64),
        source=segments["from"][segment],
    )
    return found[rows["request"][run] == found.request]


def _of_other_ranks(plan: Plan, pieces: Pieces) -> Pieces:
    """Turn keys that are rows of ranks, in their order, into positions."""
    if not len(pieces):
        return pieces
    runs, order_key = _key_runs(plan)
    wanted = pieces.source * len(plan.requests) + pieces.request
    low = np.searchsorted(order_key, wanted, side="left")
    high = np.searchsorted(order_key, wanted, side="right")
    piece, place = _each(high - low)
    run = low[piece] + place
    whole = pieces[piece]
    skipped = np.clip(whole.first - runs["offset"][run], 0, runs["count"][run])
    keys = whole.keys - (runs["offset"][run] + skipped - whole.first)
    count = runs["count"][run] - skipped
    step = runs["step"][run]
    whole = replace(whole, first=runs["position"][run] + skipped * step, keys=keys, key_step=step)
    # Until row `full` a query sees part of the run, from there all of it.
    slope = np.maximum(whole.slope, 1)
    all_at_once = np.where(keys >= count, 0, whole.rows)
    full = ints(np.where(whole.slope > 0, -(-(count - keys) // slope), all_at_once))
    full = ints(np.clip(full, 0, whole.rows))
    partial = without_empty_rows(replace(whole, rows=full))
    rest = replace(
        whole,
        position=whole.position + full * whole.stride,
        rows=whole.rows - full,
        keys=count,
        slope=np.zeros_like(count),
    )
    return partial + without_empty_rows(rest)


def _key_runs(plan: Plan) -> tuple[Columns, Ints]:
    """Runs by rank and request, with the keys before each there; and by what they are sorted."""
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
    """Leave out the first queries of pieces that see no key yet."""
    slope = np.maximum(pieces.slope, 1)
    skipped = np.where(pieces.slope > 0, -(-(1 - pieces.keys) // slope), pieces.rows)
    skipped = ints(np.where(pieces.keys > 0, 0, np.clip(skipped, 0, pieces.rows)))
    trimmed = replace(
        pieces,
        position=pieces.position + skipped * pieces.stride,
        rows=pieces.rows - skipped,
        keys=pieces.keys + skipped * pieces.slope,
    )
    return trimmed[trimmed.rows > 0]
