# SPDX-License-Identifier: Apache-2.0
"""TOPK: ranks together select the top-k, and look keys up in the right place."""

from __future__ import annotations

import numpy as np

from ...findings import Finding
from ..intervals import first_of, shard_index, shard_of
from ..model import Absent, Columns, Plan
from .check import Check, finding


def _selected(plan: Plan) -> tuple[Columns, int]:
    names = dict.fromkeys(("request", "position", "key", "index"))
    table = plan.gathered("selections", names)
    if "topk" not in plan.document:
        raise Absent("the document has no topk")
    return table, int(plan.document["topk"]["k"])


def lookups(plan: Plan) -> list[Finding]:
    """Check that a rank looks up its own keys, in the right place."""
    table, _ = _selected(plan)
    if plan.shards == 1:
        wrong = table["index"] != table["key"]
        own, wanted = np.ones(len(wrong), bool), table["key"]
    else:
        own = (
            shard_of(table["key"], plan.shards, plan.interleave)
            == plan.shard_by_rank[table["rank"]]
        )
        wanted = shard_index(table["key"], plan.shards, plan.interleave)
        wrong = ~own | (table["index"] != wanted)
    bad = first_of(wrong)
    if bad is None:
        return []
    rank, key, index = (int(table[name][bad]) for name in ("rank", "key", "index"))
    owner = int(shard_of(key, plan.shards, plan.interleave))
    should = (
        f"it is there at {wanted[bad]}" if own[bad] else f"shard {owner} has it, at {wanted[bad]}"
    )
    whole = index == key and plan.shards > 1
    place = f"{index}, its place in the sequence;" if whole else f"{index},"
    return finding(
        "topk-index", f"rank {rank} looks up key {key} at {place} {should}",
        f"request {table['request'][bad]}, query {table['position'][bad]}, key {key}", [rank],
        f"key {key}  shard {owner}, index {wanted[bad]}\nread   rank {rank}, index {index}",
        key=key, index=index, expected=wanted[bad], shard=owner, lookups=int(wrong.sum()),
    )  # fmt: skip


def complete(plan: Plan) -> list[Finding]:
    """Check that each query selects as many keys as possible, each once, and none after itself."""
    table, k = _selected(plan)
    order = np.lexsort((table["key"], table["position"], table["request"]))
    request, position, key = (table[name][order] for name in ("request", "position", "key"))
    new = np.concatenate([[True], (request[1:] != request[:-1]) | (position[1:] != position[:-1])])
    new = new[: len(key)]
    again = ~new & np.concatenate([[False], key[1:] == key[:-1]])[: len(key)]
    late = key > position
    for flags, name, says in (
        (again, "topk-twice", "twice"),
        (late, "topk-key", "though it is later"),
    ):
        bad = first_of(flags)
        if bad is not None:
            return finding(
                name, f"query {position[bad]} of request {request[bad]} selects key {key[bad]} "
                f"{says}",
                f"request {request[bad]}, query {position[bad]}, key {key[bad]}",
                table["rank"][order][(request == request[bad]) & (key == key[bad])],
                request=request[bad], query=position[bad], key=key[bad],
            )  # fmt: skip
    begins = np.flatnonzero(new)
    counts = np.diff(np.append(begins, len(key)))
    wanted = np.minimum(position[begins] + 1, k)
    bad = first_of(counts != wanted)
    if bad is None:
        return _without_keys(plan, set(zip(request[begins], position[begins], strict=True)))
    at = begins[bad]
    return finding(
        "topk-count", f"query {position[at]} of request {request[at]} selects {counts[bad]} keys "
        f"over all ranks, not {wanted[bad]}", f"request {request[at]}, query {position[at]}",
        request=request[at], query=position[at], selected=counts[bad], expected=wanted[bad],
    )  # fmt: skip


def _without_keys(plan: Plan, selecting: set[tuple[int, int]]) -> list[Finding]:
    """Report a query that has scores, and selects no key on any rank."""
    for query in plan.document["topk"].get("scores", ()):
        request, position = query["request"], query["position"]
        if (request, position) not in selecting:
            wanted = min(position + 1, plan.document["topk"]["k"])
            return finding(
                "topk-count", f"query {position} of request {request} selects no keys on any rank, "
                f"not {wanted}", f"request {request}, query {position}",
                request=request, query=position, selected=0, expected=wanted,
            )  # fmt: skip
    return []


def best(plan: Plan) -> list[Finding]:
    """Check that no unselected key has a higher score than a selected key."""
    table, k = _selected(plan)
    scored = plan.document["topk"].get("scores")
    if not scored:
        raise Absent("the document has no scores")
    query_of = table["request"] * 2**32 + table["position"]
    order = np.argsort(query_of, kind="stable")
    for query in scored:
        request, position = query["request"], query["position"]
        number = request * 2**32 + position
        low, high = (np.searchsorted(query_of, number, s, order) for s in ("left", "right"))
        mine = order[low:high]
        scores = np.asarray(query["scores"], np.float64)[: position + 1]
        chosen = np.unique(table["key"][mine])
        chosen = chosen[chosen < len(scores)]
        rest = np.setdiff1d(np.arange(len(scores)), chosen)
        if not len(chosen) or not len(rest):
            continue
        worst, missed = chosen[np.argmin(scores[chosen])], rest[np.argmax(scores[rest])]
        if scores[missed] > scores[worst]:
            least = np.sort(scores)[-len(chosen)]  # among equally many correct keys
            wrong = int((scores[chosen] < least).sum())
            return finding(
                "topk-score", f"query {position} of request {request} selects key {worst}, whose "
                f"score is {scores[worst]:g}, not key {missed} with {scores[missed]:g}; so "
                f"{wrong} of {k}", f"request {request}, query {position}, key {missed}",
                table["rank"][mine], request=request, query=position, key=missed, selected=worst,
            )  # fmt: skip
    return []


CHECKS = (
    Check("TOPK", "lookups", lookups),
    Check("TOPK", "selections", complete),
    Check("TOPK", "scores", best),
)
