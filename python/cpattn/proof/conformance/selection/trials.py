# SPDX-License-Identifier: Apache-2.0
"""Selections tried, each held against the scores.

Any order and any choice among equal scores is right: a row must have the -1 behind the others, and
as its selected scores those of its best candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..numbers import Array
from .cases import SelectionCase, candidates_of, make_scores
from .features import SelectionResult


@dataclass(frozen=True, eq=False)
class SelectionTrial:
    """What came of a case, and the scores it was about."""

    result: SelectionResult
    shared: bool = False

    @property
    def case(self) -> SelectionCase:
        case: SelectionCase = self.result.case
        return case

    @cached_property
    def scores(self) -> list[Array]:
        """Of the candidates of each row."""
        return candidates_of(self.case, make_scores(self.case, shared=self.shared))

    @property
    def indices(self) -> Array:
        """[rows, topk], of an operator that answered."""
        assert self.result.indices is not None
        return self.result.indices

    @cached_property
    def wrong_rows(self) -> list[int]:
        """Those of an answer that are not right."""
        return [
            row
            for row, (chosen, own) in enumerate(zip(self.indices, self.scores, strict=True))
            if not is_topk(chosen, own, self.case.topk)
        ]

    @cached_property
    def verdict(self) -> str:
        """ "right", "wrong", or why there is no answer."""
        if self.result.status != "answered":
            return self.result.status
        return "wrong" if self.wrong_rows else "right"


def is_topk(chosen: Array, scores: Array, topk: int) -> bool:
    """Whether a row is the top-k of its candidates."""
    count = min(topk, len(scores))
    if len(chosen) != topk or (chosen[count:] != -1).any():
        return False
    return is_best(chosen[:count], scores)


def is_best(chosen: Array, scores: Array) -> bool:
    """Whether positions are different ones of the candidates, and none left is better."""
    inside = ((chosen >= 0) & (chosen < len(scores))).all()
    if not inside or len(np.unique(chosen)) != len(chosen):
        return False
    best = np.sort(scores)[::-1][: len(chosen)]
    return bool(np.array_equal(np.sort(scores[chosen])[::-1], best))
