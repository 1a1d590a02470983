# SPDX-License-Identifier: Apache-2.0
"""BAL: the rank with the most pairs has no more than the stated multiple of the mean."""

from __future__ import annotations

import numpy as np

from ...findings import Finding
from ..model import Absent, Plan
from ..pieces import pieces_of
from .check import Check, finding


def balance(plan: Plan) -> list[Finding]:
    """Pairs of queries and keys are even over ranks."""
    if "balance" not in plan.document:
        raise Absent("the document states no bound")
    bound = float(plan.document["balance"]["bound"])
    pieces = pieces_of(plan)
    pairs = np.bincount(pieces.rank, weights=pieces.pairs, minlength=len(plan.ranks))
    mean = float(pairs.mean())
    worst = int(pairs.argmax())
    if not mean or pairs[worst] <= bound * mean:
        return []
    order = np.argsort(-pairs, kind="stable")
    shown = sorted([*order[:4], *order[4:][-4:]])
    longest = max(float(pairs.max()), 1.0)
    lines = [
        f"rank {rank:<4} {'#' * round(32 * pairs[rank] / longest):<32} {int(pairs[rank]):,} pairs, "
        f"{pairs[rank] / mean:.2f} x"
        for rank in shown
    ]
    return finding(
        "bal-pairs", f"rank {worst} has {int(pairs[worst]):,} pairs, {pairs[worst] / mean:.2f} "
        f"times the mean; the bound is {bound:g}", f"rank {worst}", [worst], "\n".join(lines),
        pairs=int(pairs[worst]), mean=mean, bound=bound,
    )  # fmt: skip


CHECKS = (Check("BAL", "pairs", balance),)
