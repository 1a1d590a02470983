# SPDX-License-Identifier: Apache-2.0
"""Named faults of selections, and the possible selections from a row with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..faults import Fault
from ..memory import owner_of
from ..numbers import Array, rounded
from .cases import EXTREMES, compared
from .rows import Row, is_best, is_topk


class Way(NamedTuple):
    """Wrong way to select: switch of the fault, its option, and a test of a row."""

    switch: str
    option: Any
    permits: Callable[[Row, Any], bool]


#: Wrong ways; an operator may select each row in any of them.
Oracle = tuple[Way, ...]

RIGHT: Oracle = (Way("", None, lambda row, _: row.is_right),)


def _ways(switch: str, permits: Callable[[Row, Any], bool], *options: Any) -> tuple[Oracle, ...]:
    """Make an oracle of each option."""
    return tuple((Way(switch, option, permits),) for option in options)


def _confused(row: Row, _: str) -> bool:
    return row.is_right if row.confused is None else is_topk(row.confused, row.scores, row.topk)


def _filled(row: Row, _: str) -> bool:
    """Test whether all candidates are selected, followed by anything but -1."""
    if row.count == row.topk:
        return row.is_right
    whole = len(row.chosen) == row.topk and is_best(row.chosen[: row.count], row.scores)
    return whole and not row.is_right


def _gaps(row: Row, _: str) -> bool:
    """Test whether all candidates are selected, with -1 at any place."""
    whole = len(row.chosen) == row.topk and len(row.selected) == row.count
    return whole and is_best(row.selected, row.scores)


def _lost(row: Row, kinds: tuple[str, ...]) -> bool:
    """Test whether only candidates with score -inf or NaN are missing."""
    finite = int(np.isfinite(row.scores).sum())
    if row.values not in kinds or finite >= row.count:
        return row.is_right
    return finite <= len(row.selected) < row.count and is_best(row.selected, row.scores)


def _other_count(row: Row, count: int | str) -> bool:
    """Test whether exactly the `count` best are selected, in a tensor of any width."""
    relative = {"one less": -1, "as many": 0, "one more": 1}
    wanted = count if isinstance(count, int) else row.topk + relative[count]
    count = min(wanted, len(row.scores))
    return len(row.selected) == count and is_best(row.selected, row.scores)


def _twice(row: Row, _: str) -> bool:
    """Test whether some candidates are selected twice, which may show only with ties."""
    chosen = row.selected
    inside = ((chosen >= 0) & (chosen < len(row.scores))).all() and len(chosen) <= row.count
    return row.is_right or bool(inside and len(np.unique(chosen)) < len(chosen))


def _smallest(row: Row, nan: str) -> bool:
    """Test whether the smallest are selected; NaN may count as the smallest or the largest."""
    turned = -row.scores if nan == "NaN first" else compared(-row.columns[: len(row.scores)])
    return is_topk(row.chosen, turned, row.topk)


def _rounded(row: Row, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        return is_topk(row.chosen, rounded(row.scores, dtype), row.topk)


def _by_part(row: Row, parts: tuple[int, str]) -> bool:
    """Test whether the best of each part of the keys are selected; parts may take keys in turn."""
    count, order = parts
    share, place, chosen = row.topk // count, np.arange(len(row.scores)), row.selected
    if not share:
        return row.is_right
    if ((chosen < 0) | (chosen >= len(place))).any():
        return False
    size = max(-(-len(place) // count), 1)
    part_of = place // size if order == "consecutive" else place % count
    parts_of_keys = (np.flatnonzero(part_of == part) for part in range(count))
    return all(_is_best_of(chosen, own, row.scores, share) for own in parts_of_keys)


def _is_best_of(chosen: Array, own: Array, scores: Array, share: int) -> bool:
    """Tell whether the selection from some keys is the best `share` of them."""
    mine = np.searchsorted(own, chosen[np.isin(chosen, own)])
    return len(mine) == min(share, len(own)) and is_best(mine, scores[own])


def _of_another_row(row: Row, order: str) -> bool:
    owner = owner_of(row.index, order, tuple(map(len, row.every)))
    return is_topk(row.chosen, row.every[owner], row.topk)


def _to(row: Row, end: str) -> bool:
    """Test whether columns after the last candidate count as candidates, with their scores."""
    last = {"last column": None, "longest row": max(map(len, row.every))}
    stop = last[end] if end in last else len(row.scores) + 1
    return is_topk(row.chosen, compared(row.columns[:stop]), row.topk)


def _hidden(row: Row, _: str) -> bool:
    """Test whether columns after the last candidate count with a low score, above extreme ones."""
    beyond = row.values in EXTREMES and bool((row.chosen >= len(row.scores)).any())
    return row.is_right or beyond


#: Faults by name. If several explain the same rows, the first counts.
SELECTION_FAULTS = {
    name: Fault(name, "TOPK", means, advice, oracles)
    for name, means, advice, oracles in (
        (
            "topk-local-ids",
            "takes positions of a sequence for those of a part of it, or the other way round",
            "Subtract the start of a row, or find the place on its rank, exactly once.",
            _ways("ids", _confused, "confused"),
        ),
        (
            "topk-padding",
            "fills rows of fewer candidates by something else than -1 behind the last",
            "Write all of a row: -1 where nothing is selected, and only behind what is.",
            (*_ways("padding", _filled, "no -1"), *_ways("padding", _gaps, "anywhere")),
        ),
        (
            "topk-lost-infinite",
            "leaves out candidates whose score is -inf or NaN, where fewer than topk are finite",
            "Count NaN as -inf, and fill rows up with such candidates before -1.",
            _ways("lost", _lost, ("-inf", "nan"), ("-inf",), ("nan",)),
        ),
        (
            "topk-k-ignored",
            "selects another number of keys than it is asked for",
            "Take topk from the call; a size that is compiled in must be refused if it differs.",
            _ways(
                "count", _other_count, "as many", "one less", "one more",
                *range(65), *(2**power for power in range(7, 15)),
            ),
        ),
        (
            "topk-twice",
            "selects a key more than once",
            "Count those that are equal to the threshold in one pass, up to what is left.",
            _ways("ties", _twice, "twice"),
        ),
        (
            "topk-smallest",
            "selects the smallest scores",
            "Compare the other way round; order-preserving keys of floats flip for negative ones.",
            _ways("smallest", _smallest, "NaN first", "NaN last"),
        ),
        (
            "topk-16-bit-scores",
            "compares scores that were rounded to 16 bits",
            "Keep scores in float32 to the end: thousands of keys are closer than 16 bits tell.",
            _ways("scores", _rounded, "bfloat16", "float16"),
        ),
        (
            "topk-per-part",
            "selects equally many of each part of the keys",
            "Select topk of each part, then topk of all those.",
            _ways(
                "parts", _by_part,
                *((n, order) for n in (2, 3, 4, 8) for order in ("consecutive", "in turn")),
            ),
        ),
        (
            "topk-row-order",
            "gives rows the selection of other rows",
            "If rows are sorted or cut into chunks, lengths and outputs go with them.",
            _ways("order", _of_another_row, "longest first", "reversed", "rolled"),
        ),
        (
            "topk-beyond-length",
            "selects positions behind the last candidate of a row",
            "Mask scores by the length of the row before they are compared.",
            (
                *_ways("end", _to, "last column", "longest row", "next column"),
                *_ways("hidden", _hidden, "by a number"),
            ),
        ),
        (
            "topk-bucket-overflow",
            "loses candidates where thousands have nearly the same score",
            "Give the buffer of candidates room for all keys, or narrow the bucket once more.",
            (),
        ),
        (
            "topk-unknown",
            "selects other keys than the top-k, in no way that has a name",
            "See which keys are missing, and which are there instead.",
            (),
        ),
    )
}  # fmt: skip
