# SPDX-License-Identifier: Apache-2.0
"""BAL: no rank has more pairs than the stated multiple of its share."""

from __future__ import annotations

import numpy as np

from ...findings import Finding, NotUsable
from ..model import Absent, Plan
from ..pieces import pieces_of
from .check import Check, finding


def balance(plan: Plan) -> list[Finding]:
    """Check that pairs of queries and keys are even over ranks, or proportional to weights."""
    if "balance" not in plan.document:
        raise Absent("the document states no bound")
    bound = float(plan.document["balance"]["bound"])
    pieces = pieces_of(plan)
    pairs = np.bincount(pieces.rank, weights=pieces.pairs, minlength=len(plan.ranks))
    given = plan.document["balance"].get("weights")
    weights = np.ones(len(pairs)) if given is None else np.array(given, float)
    if len(weights) != len(pairs) or not (weights > 0).all():
        raise NotUsable(
            f"{plan.name}: balance.weights: must be above 0, one for each of {len(pairs)} ranks"
        )
    share = pairs.sum() * (weights / weights.sum())
    times = pairs / np.maximum(share, 1e-300)
    worst = int(times.argmax())
    if times[worst] <= bound:
        return []
    of = "the mean" if given is None else "its share"
    order = np.argsort(-times, kind="stable")
    shown = sorted([*order[:4], *order[4:][-4:]])
    longest = max(float(pairs.max()), 1.0)
    lines = [
        f"rank {rank:<4} {'#' * round(32 * pairs[rank] / longest):<32} {int(pairs[rank]):,} pairs, "
        f"{times[rank]:.2f} x"
        for rank in shown
    ]
    return finding(
        "bal-pairs", f"rank {worst} has {int(pairs[worst]):,} pairs, {times[worst]:.2f} "
        f"times {of}; the bound is {bound:g}", f"rank {worst}", [worst], "\n".join(lines),
        pairs=int(pairs[worst]), mean=float(share[worst]), bound=bound,
    )  # fmt: skip


CHECKS = (Check("BAL", "pairs", balance),)
