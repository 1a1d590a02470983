# SPDX-License-Identifier: Apache-2.0
"""Row with an operator's selection, and the test whether the selection is correct.

Any order and any choice among equal scores is correct: a row must have -1 only at its end, and its
selected scores must be those of its best candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..numbers import Array


@dataclass(frozen=True, eq=False)
class Row:
    """Row of a case, and the selection from it.

    Attributes
    ----------
    chosen : [topk], with padding
    confused : [topk] or None
        `SelectionAnswer.if_confused`.
    columns : [length and more]
        Scores from the first candidate to the last column, unchanged.
    topk, index : int
    values : str
        `SelectionCase.values`.
    every : list
        Scores of the candidates of all rows, -inf for NaN.
    """

    chosen: Array
    confused: Array | None
    columns: Array
    topk: int
    index: int
    values: str
    every: list[Array]

    @property
    def scores(self) -> Array:
        """Scores of the row's candidates, -inf for NaN."""
        return self.every[self.index]

    @property
    def count(self) -> int:
        """Number of keys to select."""
        return min(self.topk, len(self.scores))

    @property
    def selected(self) -> Array:
        """Selected keys, without padding."""
        return self.chosen[self.chosen != -1]

    @property
    def is_right(self) -> bool:
        return is_topk(self.chosen, self.scores, self.topk)


def is_topk(chosen: Array, scores: Array, topk: int) -> bool:
    """Tell whether a row is the top-k of its candidates."""
    count = min(topk, len(scores))
    if len(chosen) != topk or (chosen[count:] != -1).any():
        return False
    return is_best(chosen[:count], scores)


def is_best(chosen: Array, scores: Array) -> bool:
    """Tell whether positions are distinct candidates, and no other candidate is better."""
    inside = ((chosen >= 0) & (chosen < len(scores))).all()
    if not inside or len(np.unique(chosen)) != len(chosen):
        return False
    best = np.sort(scores)[::-1][: len(chosen)]
    return bool(np.array_equal(np.sort(scores[chosen])[::-1], best))
