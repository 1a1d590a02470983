# SPDX-License-Identifier: Apache-2.0
"""Writes of new keys: each to its own slot within the cache, and padding to no other slot."""

from __future__ import annotations

import math

import numpy as np

from ...findings import Finding
from ..intervals import Ints, each, first_of, ints, offsets, shard_index, shard_of, tally
from ..model import Absent, Columns, Plan, Undecided
from ..pictures import Bars
from .check import Check, finding, more


def _writes(plan: Plan) -> Columns:
    names = dict.fromkeys(("request", "position", "count", "slot"))
    return plan.gathered("writes", names)


def _real(plan: Plan) -> Columns:
    """Return runs of tokens, without padding."""
    runs = _writes(plan)
    real = (runs["request"] >= 0) & (runs["count"] > 0)
    runs = {name: values[real] for name, values in runs.items()}
    ends = plan.lengths[runs["request"]]
    count = np.clip(ends - runs["position"], 0, runs["count"])
    padded = runs["position"] + runs["count"] <= ends + plan.pad[runs["request"]]
    runs = runs | {"count": np.where(padded, count, runs["count"])}
    return {name: values[runs["count"] > 0] for name, values in runs.items()}


def _cut(runs: Columns, unit: int) -> Columns:
    """Cut runs at positions that `unit` divides."""
    last = (runs["position"] + np.maximum(runs["count"], 1) - 1) // unit
    source, place = each(np.where(runs["count"] > 0, last - runs["position"] // unit + 1, 0))
    begin = np.maximum((runs["position"][source] // unit + place) * unit, runs["position"][source])
    end = np.minimum(
        (runs["position"][source] // unit + place + 1) * unit,
        runs["position"][source] + runs["count"][source],
    )
    cut = {name: values[source] for name, values in runs.items()}
    moved = begin - cut["position"]
    return cut | {"position": begin, "count": end - begin, "slot": cut["slot"] + moved}


def _units(plan: Plan) -> int:
    page_size = int(plan.cache.get("page_size", 1))
    return page_size if plan.shards == 1 else math.gcd(plan.interleave, page_size)


def written(plan: Plan) -> list[Finding]:
    """Check that each new token is written once: by each rank, its shard, or one rank."""
    runs = _cut(_real(plan), _units(plan)) if plan.shards > 1 else _real(plan)
    shard = plan.shard_by_rank[runs["rank"]]
    foreign = shard_of(runs["position"], plan.shards, plan.interleave) != shard
    bad = first_of(foreign & (plan.shards > 1))
    if bad is not None:
        request, position = int(runs["request"][bad]), int(runs["position"][bad])
        owner = int(shard_of(position, plan.shards, plan.interleave))
        return finding(
            "own-slot", f"rank {runs['rank'][bad]} writes position {position} of request "
            f"{request}, which shard {owner} keeps", f"request {request}, position {position}",
            [runs["rank"][bad]], request=request, position=position, shard=owner,
        )  # fmt: skip
    low, high = plan.prefix[runs["request"]], plan.lengths[runs["request"]]
    bad = first_of((runs["position"] < low) | (runs["position"] + runs["count"] > high))
    if bad is not None:
        request, position = int(runs["request"][bad]), int(runs["position"][bad])
        return finding(
            "own-slot", f"rank {runs['rank'][bad]} writes positions {position} to "
            f"{position + runs['count'][bad] - 1} of request {request}, whose new tokens are "
            f"{low[bad]} to {high[bad] - 1}", f"request {request}, position {position}",
            [runs["rank"][bad]], request=request, position=position,
        )  # fmt: skip
    copy = _copies(plan)
    copies, total = int(copy.max()) + 1, plan.num_tokens
    begin = plan.token_of(runs["request"], runs["position"]) + copy[runs["rank"]] * total
    edges, counts = tally(
        begin, begin + runs["count"], [(i * total, (i + 1) * total) for i in range(copies)]
    )
    bad = first_of(counts)
    if bad is None:
        return []
    request, position = plan.place(int(edges[bad]) % total)
    times = int(counts[bad]) + 1
    ranks = np.flatnonzero(copy == int(edges[bad]) // total).tolist()
    by = f"by rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    if copies == 1 and len(ranks) > 1:
        ranks, by = [], "by all ranks together"
    return finding(
        "own-slot", f"position {position} of request {request} is written {times} times {by}, not "
        "once", f"request {request}, position {position}", ranks, request=request,
        position=position, times=times,
    )  # fmt: skip


def _copies(plan: Plan) -> Ints:
    """Return the index of the cache copy that each rank has, or has a share of."""
    if plan.cache.get("shared", False):
        return np.zeros(len(plan.ranks), np.int64)
    if plan.shards == 1:
        return np.arange(len(plan.ranks))
    copy = plan.copy_by_rank("writes")
    said = np.array(["writes" in rank for rank in plan.ranks])
    counts = np.bincount(plan.shard_by_rank[said], minlength=plan.shards)
    if counts.max() > 1 and counts.min() < counts.max():
        raise Undecided(f"{int(said.sum())} ranks that write have not as many of each shard")
    return np.where(said, copy, 0)


def slots(plan: Plan) -> list[Finding]:
    """Check that no slot has two tokens, and each token has the slot of the table."""
    runs = _real(plan)
    shared = bool(plan.cache.get("shared", False))
    span = int(runs["slot"].max(initial=0) + runs["count"].max(initial=0) + 1)
    shift = 0 if shared else runs["rank"] * span
    edges, counts = tally(runs["slot"] + shift, runs["slot"] + shift + runs["count"])
    bad = first_of(counts > 1)
    if bad is not None:
        slot = int(edges[bad]) % span
        at = (runs["slot"] <= slot) & (slot < runs["slot"] + runs["count"])
        at &= shared | (runs["rank"] == int(edges[bad]) // span)
        names, bars = [], Bars(max(slot - 24, 0), slot + 24, slot)
        for run in np.flatnonzero(at)[:4]:
            request, begin = int(runs["request"][run]), int(runs["slot"][run])
            names.append(f"position {runs['position'][run] + slot - begin} of request {request}")
            bars.add(f"request {request}", [(begin, begin + int(runs["count"][run]))])
        return finding(
            "own-slot", f"slot {slot} is written for {' and '.join(names[:2])}", f"slot {slot}",
            runs["rank"][at], bars.picture(), slot=slot, times=counts[bad],
        )  # fmt: skip
    return _slots_of_tables(plan, runs)


def _slots_of_tables(plan: Plan, runs: Columns) -> list[Finding]:
    page_size = int(plan.cache.get("page_size", 0))
    if not page_size:
        return []
    runs = _cut(runs, _units(plan))
    local = shard_index(runs["position"], plan.shards, plan.interleave)
    ends = np.searchsorted(runs["rank"], np.arange(len(plan.ranks) + 1))  # ranks are in order
    before: list[list[int]] | None = None
    for rank in np.flatnonzero(np.diff(ends)).tolist():
        table = plan.table(rank)
        if table is None:
            continue
        mine = np.arange(ends[rank], ends[rank + 1])
        if table is not before:
            base = offsets(ints([len(row) for row in table]))
            pages = np.concatenate([*(ints(row) for row in table), ints([-1])])
            before = table
        owner, column = runs["request"][mine], local[mine] // page_size
        there = base[owner] + column < base[owner + 1]  # else too short, which is LEN
        page = pages[np.where(there, base[owner] + column, -1)]
        wanted = page * page_size + local[mine] % page_size
        wrong = there & (wanted != runs["slot"][mine])
        bad = first_of(wrong)
        if bad is not None:
            request, position = (int(runs[name][mine[bad]]) for name in ("request", "position"))
            slot = int(runs["slot"][mine[bad]])
            return finding(
                "own-slot", f"rank {rank} writes position {position} of request {request} to slot "
                f"{slot}, its table names {wanted[bad]}" + more(int(wrong.sum()) - 1, "run"),
                f"request {request}, position {position}", [rank],
                f"table   page {wanted[bad] // page_size}, row {wanted[bad] % page_size}\n"
                f"written page {slot // page_size}, row {slot % page_size}",
                request=request, position=position, slot=slot, expected=wanted[bad],
            )  # fmt: skip
    return []


def bounds(plan: Plan) -> list[Finding]:
    """Check that nothing is written outside of the cache."""
    runs = _real(plan)
    bad = first_of(runs["slot"] < 0)
    if bad is not None:
        slot, rank = int(runs["slot"][bad]), int(runs["rank"][bad])
        request, position = int(runs["request"][bad]), int(runs["position"][bad])
        return finding(
            "addr-slot", f"rank {rank} writes position {position} of request {request} to slot "
            f"{slot}", f"slot {slot}", [rank], slot=slot,
        )  # fmt: skip
    if "num_pages" not in plan.cache:
        raise Absent("the cache has no num_pages")
    runs = _writes(plan)
    size = int(plan.cache["num_pages"]) * int(plan.cache["page_size"])
    end = runs["slot"] + runs["count"]
    bad = first_of((runs["count"] > 0) & (runs["slot"] >= 0) & (end > size))
    if bad is None:
        return []
    slot = max(size, int(runs["slot"][bad]))
    return finding(
        "addr-slot", f"rank {runs['rank'][bad]} writes slot {slot}, the cache has {size}",
        f"slot {slot}", [runs["rank"][bad]], slot=slot, slots=size,
    )  # fmt: skip


def padding(plan: Plan) -> list[Finding]:
    """Check that padding rows go to the padding page or nowhere, and other rows not there."""
    runs = _writes(plan)
    page_size = int(plan.cache.get("page_size", 1))
    real = runs["request"] >= 0
    owner = np.where(real, runs["request"], 0)
    ends = plan.lengths[owner] if len(plan.requests) else ints([0] * len(owner))
    behind = real & (runs["position"] + runs["count"] > ends)
    first = np.where(
        behind, np.maximum(runs["slot"], runs["slot"] + ends - runs["position"]), runs["slot"]
    )
    end = runs["slot"] + runs["count"]
    page = plan.cache.get("padding_page")
    low, high = (page * page_size, (page + 1) * page_size) if page is not None else (0, 0)
    padded = ~real | (behind & (plan.pad[owner] > 0 if len(plan.requests) else False))
    padded &= (runs["count"] > 0) & (runs["slot"] >= 0)
    bad = first_of(padded & ((first < low) | (end > high)))
    if bad is None:
        return _tokens_on_page(plan, int(page), low, high) if page is not None else []
    slot = int(first[bad])
    allowed = f"padding may use page {page}" if page is not None else "no page is for padding"
    return finding(
        "pad-slot", f"rank {runs['rank'][bad]} writes padding to slot {slot} of page "
        f"{slot // page_size}; {allowed}", f"slot {slot}", [runs["rank"][bad]], slot=slot,
        page=slot // page_size,
    )  # fmt: skip


def _tokens_on_page(plan: Plan, page: int, low: int, high: int) -> list[Finding]:
    """Report tokens that are written to the padding page, where padding overwrites them."""
    runs = _real(plan)
    bad = first_of((runs["slot"] < high) & (runs["slot"] + runs["count"] > low))
    if bad is None:
        return []
    rank, request, position = (int(runs[name][bad]) for name in ("rank", "request", "position"))
    into = max(low - int(runs["slot"][bad]), 0)
    return finding(
        "pad-slot", f"rank {rank} writes position {position + into} of request {request} to page "
        f"{page}, which is for padding", f"slot {runs['slot'][bad] + into}", [rank],
        slot=runs["slot"][bad] + into, page=page,
    )  # fmt: skip


CHECKS = (
    Check("OWN", "writes", written),
    Check("OWN", "slots", slots),
    Check("ADDR", "writes", bounds),
    Check("PAD", "writes", padding),
)
