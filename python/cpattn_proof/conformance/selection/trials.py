# SPDX-License-Identifier: Apache-2.0
"""Trials of selections, each compared with the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..numbers import first_of
from ..trials import Kind, Trial
from .cases import SelectionCase, candidates_of, cases, edge_cases, make_scores
from .faults import RIGHT, SELECTION_FAULTS, Oracle
from .rows import Row

_CROWDED = 1024  # candidates that fit into a bucket of any sensible size


@dataclass(frozen=True, eq=False)
class SelectionTrial(Trial):
    """Result of a selection; `shared`: all rows have the same scores."""

    shared: bool = False

    @cached_property
    def rows(self) -> list[Row]:
        """Rows of the case, if the operator answered."""
        case, indices, confused = self.case, self.result.indices, self.result.if_confused
        assert indices is not None
        scores = make_scores(case, shared=self.shared)
        every = candidates_of(case, scores)
        return [
            Row(
                indices[i], None if confused is None else confused[i], scores[i][start:],
                case.topk, i, case.values, every,
            )
            for i, start in enumerate(case.first_columns)
        ]  # fmt: skip

    @cached_property
    def wrong_rows(self) -> list[Row]:
        """Wrong rows of an answer."""
        return [row for row in self.rows if not row.is_right]

    @cached_property
    def verdict(self) -> str:
        """Verdict: "right", "wrong", or why there is no answer."""
        if self.result.status != "answered":
            return self.result.status
        return "wrong" if self.wrong_rows else "right"

    def _compare(self, oracle: Oracle) -> bool:
        return all(any(way.permits(row, way.option) for way in oracle) for row in self.rows)

    def picture(self) -> str:
        """Draw the selection from the first wrong row, and the missing keys."""
        if self.verdict != "wrong":
            return super().picture()
        row = self.wrong_rows[0]
        chosen, scores = row.chosen, row.scores
        best = np.argsort(-scores, kind="stable")[: row.count]
        inside = chosen[(chosen >= 0) & (chosen < len(scores))]
        better = scores[best] > np.min(scores[inside], initial=np.inf)
        missing = np.setdiff1d(best[better] if len(inside) else best, inside)
        lines = [
            f"row {row.index}: {len(scores)} candidates, top {row.topk}",
            f"selected: {first_of(chosen)}",
            f"best:     {first_of(best)}",
        ]
        if len(missing):
            lines.append(f"missing:  {first_of(missing)}, {len(missing)} in all")
        return "\n".join([*lines, f"wrong: {len(self.wrong_rows)} of {len(self.rows)} rows"])


def _rule(wrong: Sequence[SelectionTrial], right: Sequence[SelectionTrial]) -> str:
    """Name the fault of many candidates that go wrong only if their scores are close.

    Close scores are equal in 16 bits, so an oracle with such scores explains too much.
    """
    apart = {t.case.lengths for t in right if t.case.values == "normal"}
    few = {t.case.values for t in right if not _is_crowded(t.case)}
    overflows = all(
        _is_crowded(t.case) and t.case.lengths in apart and t.case.values in few for t in wrong
    )
    return "topk-bucket-overflow" if overflows else ""


def _is_crowded(case: SelectionCase) -> bool:
    """Tell whether a bucket may be too small, as many candidates have close scores."""
    return case.values != "normal" and max(case.lengths) > _CROWDED


def _covers(tried: Sequence[SelectionTrial]) -> dict[str, bool]:
    cases = [trial.case for trial in tried]
    return {
        "OWN": any(len(case.lengths) > 1 for case in cases),
        "LEN": any(len(set(case.lengths)) > 1 for case in cases),
        "TOPK": True,
        "PAD": any(min(case.lengths) < case.topk or case.high for case in cases),
    }


SelectionTrial.kind = SELECTION = Kind(
    edge_cases, cases, lambda result, signature: SelectionTrial(result, signature.shared),
    channels=("wrong",), faults=SELECTION_FAULTS, unknown="topk-unknown", right=RIGHT, rule=_rule,
    chance=1,  # some fault explains any selection of close scores
    together=lambda one, other: one + other,  # each row has one of the faults
    told=lambda oracle: {way.switch: way.option for way in oracle if way.switch},
    covers=_covers,
    reasons={
        **dict.fromkeys(("OWN", "LEN", "PAD"), "no case has it"),
        "COV": "nothing is attended to", "LSE": "there is no log-sum-exp",
        "SEQ": "an operator issues no collectives", "XFER": "an operator sends nothing",
        "ADDR": "no scores are as large as 31 bits", "BAL": "time is not measured",
    },
)  # fmt: skip
