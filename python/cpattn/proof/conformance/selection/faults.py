# SPDX-License-Identifier: Apache-2.0
"""The faults of selections that have a name, and what tells each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..faults import Fault
from ..numbers import Array, rounded
from .trials import SelectionTrial, is_best, is_topk

_PARTS = (2, 3, 4, 8)
_CROWDED = 1024  # candidates that a bucket of any sensible size has room for


class Row(NamedTuple):
    """What an operator selected of a row that it has wrong.

    Attributes
    ----------
    chosen : [topk], with padding
    scores : [length]
    topk : int
    others : list
        The scores of all rows.
    confused : [topk] or None
        `SelectionAnswer.if_confused`.
    """

    chosen: Array
    scores: Array
    topk: int
    others: list[Array]
    confused: Array | None

    @property
    def valid(self) -> Array:
        """Positions that are candidates."""
        return self.chosen[(self.chosen >= 0) & (self.chosen < len(self.scores))]

    @property
    def selected(self) -> Array:
        """All but padding."""
        return self.chosen[self.chosen != -1]


def rows_of(trial: SelectionTrial) -> list[Row]:
    """The rows that an operator has wrong."""
    confused = trial.result.if_confused
    return [
        Row(
            trial.indices[i], trial.scores[i], trial.case.topk, trial.scores,
            None if confused is None else confused[i],
        )
        for i in trial.wrong_rows
    ]  # fmt: skip


def _confused(row: Row) -> bool:
    return row.confused is not None and is_topk(row.confused, row.scores, row.topk)


def _padding(row: Row) -> bool:
    """All candidates are there, and something else than -1 behind them, or -1 between them."""
    count = min(row.topk, len(row.scores))
    if len(row.chosen) != row.topk:
        return False
    if len(row.selected) == count and is_best(row.selected, row.scores):
        return True
    return count < row.topk and is_best(row.chosen[:count], row.scores)


def _twice(row: Row) -> bool:
    unique = np.unique(row.selected)
    inside = len(row.valid) == len(row.selected)
    return inside and len(unique) < len(row.selected)


def _beyond(row: Row) -> bool:
    return bool((row.chosen >= len(row.scores)).any())


def _smallest(row: Row) -> bool:
    return is_topk(row.chosen, -row.scores, row.topk)


def _16_bits(row: Row) -> bool:
    with np.errstate(over="ignore"):
        narrow = [rounded(row.scores, dtype) for dtype in ("bfloat16", "float16")]
    return any(is_topk(row.chosen, scores, row.topk) for scores in narrow)


def _by_part(row: Row) -> bool:
    """So many of each part of the keys, which are consecutive or dealt out in turn."""
    place = np.arange(len(row.scores))
    for count in _PARTS:
        share = row.topk // count
        size = -(-len(place) // count)
        for part_of in (place // max(size, 1), place % count):
            chosen = row.selected
            if not share or len(row.valid) < len(chosen):
                continue
            parts = [np.flatnonzero(part_of == part) for part in range(count)]
            if all(_is_best_of(chosen, own, row.scores, share) for own in parts):
                return True
    return False


def _is_best_of(chosen: Array, own: Array, scores: Array, share: int) -> bool:
    """Whether what is selected of some keys is the best `share` of them."""
    mine = np.searchsorted(own, chosen[np.isin(chosen, own)])
    return len(mine) == min(share, len(own)) and is_best(mine, scores[own])


def _of_another_row(row: Row) -> bool:
    return any(is_topk(row.chosen, other, row.topk) for other in row.others)


def _lost(row: Row) -> bool:
    """Candidates whose score is -inf are missing, and nothing else."""
    count = min(row.topk, len(row.scores))
    finite = int(np.isfinite(row.scores).sum())
    return finite <= len(row.selected) < count and is_best(row.selected, row.scores)


def _other_count(row: Row) -> bool:
    count = min(row.topk, len(row.scores))
    other = len(row.selected) != count or len(row.chosen) != row.topk
    return other and is_best(row.selected, row.scores)


class SelectionFault(NamedTuple):
    """A fault, and whether it explains a row that is wrong; None where that is not told by rows."""

    fault: Fault
    explains: Callable[[Row], bool] | None = None


_ALL = (
    SelectionFault(
        Fault(
            "topk-local-ids", "TOPK",
            "takes positions of a sequence for those of a part of it, or the other way round",
            "Subtract the start of a row, or find the place on its rank, exactly once.",
        ),
        _confused,
    ),
    SelectionFault(
        Fault(
            "topk-padding", "TOPK",
            "fills rows of fewer candidates by something else than -1 behind the last",
            "Write all of a row: -1 where nothing is selected, and only behind what is.",
        ),
        _padding,
    ),
    SelectionFault(
        Fault(
            "topk-lost-infinite", "TOPK",
            "leaves out candidates whose score is -inf or NaN, where fewer than topk are finite",
            "Count NaN as -inf, and fill rows up with such candidates before -1.",
        ),
        _lost,
    ),
    SelectionFault(
        Fault(
            "topk-k-ignored", "TOPK",
            "selects another number of keys than it is asked for",
            "Take topk from the call; a size that is compiled in must be refused if it differs.",
        ),
        _other_count,
    ),
    SelectionFault(
        Fault(
            "topk-twice", "TOPK",
            "selects a key more than once",
            "Count those that are equal to the threshold in one pass, up to what is left.",
        ),
        _twice,
    ),
    SelectionFault(
        Fault(
            "topk-smallest", "TOPK",
            "selects the smallest scores",
            "Compare the other way round; order-preserving keys of floats flip for negative ones.",
        ),
        _smallest,
    ),
    SelectionFault(
        Fault(
            "topk-16-bit-scores", "TOPK",
            "compares scores that were rounded to 16 bits",
            "Keep scores in float32 to the end: thousands of keys are closer than 16 bits tell.",
        ),
        _16_bits,
    ),
    SelectionFault(
        Fault(
            "topk-per-part", "TOPK",
            "selects equally many of each part of the keys",
            "Select topk of each part, then topk of all those.",
        ),
        _by_part,
    ),
    SelectionFault(
        Fault(
            "topk-row-order", "TOPK",
            "gives rows the selection of other rows",
            "If rows are sorted or cut into chunks, lengths and outputs go with them.",
        ),
        _of_another_row,
    ),
    SelectionFault(
        Fault(
            "topk-beyond-length", "TOPK",
            "selects positions behind the last candidate of a row",
            "Mask scores by the length of the row before they are compared.",
        ),
        _beyond,
    ),
    SelectionFault(
        Fault(
            "topk-bucket-overflow", "TOPK",
            "loses candidates where thousands have nearly the same score",
            "Give the buffer of candidates room for all keys, or narrow the bucket once more.",
        ),
    ),
    SelectionFault(
        Fault(
            "topk-unknown", "TOPK",
            "selects other keys than the top-k, in no way that has a name",
            "See which keys are missing, and which are there instead.",
        ),
    ),
)  # fmt: skip

#: By name. Where several explain the same rows, the first does.
SELECTION_FAULTS = {found.fault.name: found for found in _ALL}


def explains(found: SelectionFault, trial: SelectionTrial) -> bool:
    """Whether all rows that a trial has wrong are so by this fault."""
    return found.explains is not None and all(map(found.explains, rows_of(trial)))


def is_crowded(case: object) -> bool:
    """Whether so many candidates are so close that a bucket may be too small for them."""
    values, lengths = getattr(case, "values", ""), getattr(case, "lengths", ())
    return values != "normal" and max(lengths) > _CROWDED
