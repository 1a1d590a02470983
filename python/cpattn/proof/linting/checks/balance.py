# SPDX-License-Identifier: Apache-2.0
"""BAL: the rank with the most pairs has no more than the stated multiple of the mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...findings import Finding
from ..model import Absent, Plan
from ..pieces import Pieces, pieces_of
from .check import Check, finding


def balance(plan: Plan) -> list[Finding]:
    """Pairs of queries and keys are even over ranks."""
    if "balance" not in plan.document:
        raise Absent("the document states no bound")
    bound = float(plan.document["balance"]["bound"])
    pieces = pieces_of(plan)
    pairs = np.bincount(pieces.rank, weights=_pairs(plan, pieces), minlength=len(plan.ranks))
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


def _pairs(plan: Plan, pieces: Pieces) -> NDArray[np.float64]:
    """Pairs of each piece, of which a window leaves so many for a query."""
    if plan.window is None:
        return pieces.pairs
    if not plan.causal or plan.shards > 1 or (pieces.source >= 0).any():
        raise Absent("windows are judged under a causal mask where keys are those of the cache")
    most, slope = plan.window + 1, np.maximum(pieces.slope, 1)
    whole = np.where(pieces.slope > 0, -(-(most - pieces.keys) // slope), pieces.rows)
    whole = np.where(pieces.keys >= most, 0, np.clip(whole, 0, pieces.rows))
    below = replace(pieces, rows=whole).pairs
    return below + (pieces.rows - whole) * float(most)


CHECKS = (Check("BAL", "pairs", balance),)
