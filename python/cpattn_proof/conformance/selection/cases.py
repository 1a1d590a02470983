# SPDX-License-Identifier: Apache-2.0
"""Scores for key selection: description and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from ..cases import Told
from ..numbers import Array

VALUES = ("normal", "ties", "equal", "rising", "falling")
EXTREMES = ("low", "-inf", "nan")
_LOW = -65_600  # below any number of float16
_HIDDEN = 0.9  # fraction of the scores that are -inf or NaN
_SPARE_COLUMNS = 3
_NEAR = 2.0**-18  # distance of scores that share the first bits
_HIGH = 1e30  # score larger than all others, which must not be selected
_LENGTHS = (0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 100, 255, 257)
_TOPKS = (1, 2, 4, 8, 32, 64)
_LONG, _LONGEST = 5000, 20_000


@dataclass(frozen=True)
class SelectionFeatures:
    """Cases that calls of a signature can express; others are not made.

    Attributes
    ----------
    starts : bool
        Rows whose candidates begin at other columns than 0.
    empty : bool
        Rows without candidates.
    high : bool
        Scores outside of a row's candidates that are larger than theirs.
    low : bool
        Scores of candidates below the numbers of float16, and -inf.
    nan : bool
        Scores of candidates that are NaN, which count as -inf.
    ranks : bool
        Keys that are distributed over ranks.
    """

    starts: bool = False
    empty: bool = True
    high: bool = True
    low: bool = True
    nan: bool = True
    ranks: bool = False


@dataclass(frozen=True)
class SelectionCase(Told):
    """One call.

    Attributes
    ----------
    lengths : tuple of int
        Candidates of each row.
    topk : int
        Number of selected candidates.
    starts : tuple of int
        First candidate of each row; empty if all begin at 0.
    values : {"normal", "ties", "equal", "rising", "falling", "low", "-inf", "nan"}
        Scores far from each other; of four values; of one; close to each other, in order; below the
        numbers of float16; or mostly -inf or NaN, which counts as -inf.
    high : bool
        Whether scores outside of a row's candidates are larger than all of theirs.
    ranks, interleave : int
        Number of ranks with shares of the keys, and consecutive keys per rank.
    """

    lengths: tuple[int, ...] = (8,)
    topk: int = 4
    starts: tuple[int, ...] = ()
    values: str = "normal"
    high: bool = False
    ranks: int = 1
    interleave: int = 1
    seed: int = 0

    @property
    def size(self) -> int:
        """Measure of how much a person has to look at."""
        return sum(self.lengths) + self.topk + 8 * self.extras() + 4 * len(self.lengths)

    @property
    def first_columns(self) -> tuple[int, ...]:
        """Return `starts` for each row."""
        return self.starts or (0,) * len(self.lengths)


def make_scores(case: SelectionCase, *, shared: bool = False) -> Array:
    """Return scores [rows, columns], float32; `shared`: all rows have the same ones."""
    rng = np.random.default_rng(case.seed)
    ends = [start + n for start, n in zip(case.first_columns, case.lengths, strict=True)]
    rows, columns = len(case.lengths), max(ends) + _SPARE_COLUMNS
    shape = (1 if shared else rows, columns)
    match case.values:
        case "normal":
            scores = np.exp(2 * rng.standard_normal(shape))
        case "ties":
            scores = rng.integers(1, 5, shape).astype(np.float64)
        case "equal":
            scores = np.ones(shape)
        case "low":
            scores = _LOW * (1 + rng.random(shape))
        case "-inf" | "nan":
            scores = rng.standard_normal(shape)
            scores[rng.random(shape) < _HIDDEN] = float(case.values)
        case _:
            place = np.arange(columns) if case.values == "rising" else np.arange(columns)[::-1]
            scores = np.broadcast_to(1 + place * _NEAR, shape).copy()
    scores = np.broadcast_to(scores, (rows, columns)).astype(np.float32)
    if case.high and not shared:
        column = np.arange(columns)
        for row, start, end in zip(scores, case.first_columns, ends, strict=True):
            row[(column < start) | (column >= end)] = _HIGH
    return scores


def candidates_of(case: SelectionCase, scores: Array) -> list[Array]:
    """Return the scores of each row's candidates, -inf for NaN."""
    rows = zip(scores, case.first_columns, case.lengths, strict=True)
    return [compared(row[start : start + n]) for row, start, n in rows]


def compared(scores: Array) -> Array:
    """Return scores as they count: -inf for NaN."""
    return np.where(np.isnan(scores), -np.inf, scores)


def values_of(features: SelectionFeatures) -> tuple[str, ...]:
    """Return the kinds of scores that a signature can express."""
    can = (features.low, features.low, features.nan)
    return (*VALUES, *(values for values, yes in zip(EXTREMES, can, strict=True) if yes))


def edge_cases(features: SelectionFeatures) -> Iterator[SelectionCase]:
    """Return a case for each thing that can go wrong alone, small ones first."""
    ranks = 2 if features.ranks else 1
    small = SelectionCase((9,), 4, ranks=ranks)
    batch = SelectionCase((40, 17, 33), 8, ranks=ranks)
    yield small
    yield batch
    for values in values_of(features)[1:]:
        yield replace(batch, values=values)
    yield replace(batch, topk=1)
    yield replace(batch, topk=17)
    yield replace(batch, lengths=(40, 5, 1), topk=16)  # some rows have fewer than topk candidates
    yield replace(batch, lengths=(16, 15, 17), topk=16)
    yield replace(batch, lengths=(5, 3, 4), topk=16)
    if features.empty:
        yield replace(batch, lengths=(0, 17, 3))
    if features.high:
        yield replace(batch, high=True)
    if features.starts:
        yield replace(batch, starts=(0, 40, 57))
        yield replace(batch, starts=(7, 40, 57), high=features.high)
        yield replace(batch, lengths=(3, 17, 2), starts=(5, 1, 9))
    if features.ranks:
        for count, interleave in ((2, 1), (3, 1), (4, 16), (2, 64)):
            yield replace(batch, lengths=(70, 200, 133), ranks=count, interleave=interleave)
            yield replace(batch, lengths=(3, 70, 1), ranks=count, interleave=interleave)
    for length in (_LONG, _LONGEST):
        for values in ("normal", "rising", "falling", "equal"):
            yield SelectionCase((length,), 64, values=values, ranks=ranks)


@st.composite
def cases(
    draw: st.DrawFn, features: SelectionFeatures, like: SelectionCase | None = None
) -> SelectionCase:
    """Draw any case that a signature can express; or one like another, and as long."""
    topk = draw(st.sampled_from(_TOPKS))
    length, values = st.sampled_from((*_LENGTHS, topk - 1, topk, topk + 1)), values_of(features)
    if like is not None:
        length = st.integers(0, max(like.lengths))
        values = tuple(dict.fromkeys((VALUES[0], like.values)))
    rows = draw(st.lists(st.tuples(length, st.integers(0, 50)), min_size=1, max_size=4))
    begin_elsewhere = features.starts and draw(st.booleans())
    return SelectionCase(
        tuple(max(n, 0 if features.empty else 1) for n, _ in rows), topk,
        tuple(start for _, start in rows) if begin_elsewhere else (),
        draw(st.sampled_from(values)),
        features.high and draw(st.booleans()),
        draw(st.integers(2, 4)) if features.ranks else 1,
        draw(st.sampled_from((1, 3, 16))) if features.ranks else 1,
        draw(st.integers(0, 999)),
    )  # fmt: skip
