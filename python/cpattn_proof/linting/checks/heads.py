# SPDX-License-Identifier: Apache-2.0
"""OWN of heads: one rank of a group has each head, with its KV head and its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...findings import Finding
from ..model import Absent, Plan
from ..pictures import Bars, ranges_of
from .check import Check, finding, many


def _groups(plan: Plan) -> dict[int, list[int]]:
    """Return ranks by the number of the group that splits the heads."""
    if not plan.ranks or "heads" not in plan.document or any("heads" not in r for r in plan.ranks):
        raise Absent("not every rank, or not the document, has heads")
    groups: dict[int, list[int]] = {}
    for number, rank in enumerate(plan.ranks):
        groups.setdefault(rank["heads"].get("group", 0), []).append(number)
    return groups


def _picture(plan: Plan, ranks: list[int], name: str, mark: int) -> str:
    bars = Bars(0, max(plan.document["heads"]["q"], mark + 1), mark)
    for rank in ranks:
        bars.add(f"rank {rank} {name}", ranges_of(plan.ranks[rank]["heads"].get(name, ())))
    return bars.picture()


def owners(plan: Plan) -> list[Finding]:
    """Check that one rank of a group computes each query head."""
    count = plan.document.get("heads", {}).get("q", 0)
    for ranks in _groups(plan).values():
        held = Counter(head for rank in ranks for head in plan.ranks[rank]["heads"]["q"])
        wrong = sorted(head for head in {*range(count), *held} if held[head] != (head < count))
        if wrong:
            head = wrong[0]
            owning = [rank for rank in ranks if head in plan.ranks[rank]["heads"]["q"]]
            what = f"query head {head} is on {many(held[head], 'rank')}, not 1"
            if head >= count:
                what = f"query head {head} is on a rank, the model has {count}"
            return finding(
                "own-head", what, f"head {head}", owning or ranks,
                _picture(plan, ranks, "q", head), head=head, times=held[head], heads=count,
            )  # fmt: skip
    return []


def pairs(plan: Plan) -> list[Finding]:
    """Check that a rank has the KV head of each of its query heads."""
    groups, model = _groups(plan), plan.document["heads"]
    kv = model.get("kv")
    if kv is None or not all("kv" in rank["heads"] for rank in plan.ranks):
        raise Absent("not every rank, or not the document, has heads of keys")
    if model["q"] % kv:
        return finding(
            "own-head", f"{model['q']} query heads over {kv} of keys: {model['q'] / kv:g} each",
            "heads", ratio=model["q"] / kv,
        )  # fmt: skip
    for rank in (rank for ranks in groups.values() for rank in ranks):
        heads = plan.ranks[rank]["heads"]
        own = set(heads["kv"])
        for head in heads["q"]:
            wanted = head * kv // model["q"]
            if head < model["q"] and wanted not in own:
                return finding(
                    "own-head", f"rank {rank} has query head {head} and heads of keys "
                    f"{heads['kv']!s:.60}, but not its own, {wanted}", f"head {head}", [rank],
                    _picture(plan, [rank], "q", head), head=head, wanted=wanted,
                )  # fmt: skip
        if fault := _uneven(rank, heads) or _taken_for_another(plan, rank):
            return fault
    return []


def _uneven(rank: int, heads: Mapping[str, Any]) -> list[Finding]:
    """Check that each KV head has equally many query heads, as kernels assume."""
    q, kv = len(heads["q"]), len(heads["kv"])
    if not kv or q % kv == 0:
        return []
    return finding(
        "own-head", f"rank {rank} has {q} query heads over {kv} of keys: {q / kv:g} each",
        f"rank {rank}", [rank], q=q, kv=kv,
    )  # fmt: skip


def _taken_for_another(plan: Plan, rank: int) -> list[Finding]:
    """Check that query heads follow KV heads in order, equally many each, as kernels assume."""
    model, heads = plan.document["heads"], plan.ranks[rank]["heads"]
    q, kv = heads["q"], heads["kv"]
    for place, head in enumerate(q if kv else ()):
        wanted, taken = head * model["kv"] // model["q"], kv[place * len(kv) // len(q)]
        if head < model["q"] and taken != wanted:
            return finding(
                "own-head", f"rank {rank} takes the head of keys {taken} for query head {head}, "
                f"whose own is {wanted}: {len(q)} query heads over {kv}", f"head {head}", [rank],
                _picture(plan, [rank], "q", head), head=head, wanted=wanted, taken=taken,
            )  # fmt: skip
    return []


def weights(plan: Plan) -> list[Finding]:
    """Check that the rows of the output projection are those of the rank's own heads."""
    _groups(plan)
    if not any("weights" in rank["heads"] for rank in plan.ranks):
        raise Absent("no rank says which weights it has")
    for number, rank in enumerate(plan.ranks):
        heads, have = rank["heads"]["q"], rank["heads"].get("weights")
        if have is not None and list(have) != list(heads):
            head = next((a for a, b in zip(heads, have, strict=False) if a != b), len(have))
            return finding(
                "own-head", f"rank {number} computes heads {heads!s:.60}, and has weights of "
                f"{have!s:.60}",
                f"head {head}", [number], _picture(plan, [number], "weights", head),
                head=head, heads=heads, weights=have,
            )  # fmt: skip
    return []


CHECKS = (
    Check("OWN", "heads", owners),
    Check("OWN", "heads of keys", pairs),
    Check("OWN", "weights of heads", weights),
)
