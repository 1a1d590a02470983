# SPDX-License-Identifier: Apache-2.0
"""COV: over all calls of all ranks, each query sees each key that it may see exactly once.

Between two places where calls begin or end, the keys of each call grow linearly from query to
query. If they fit at both ends they fit between, so few queries of a long sequence are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...findings import Finding
from ..intervals import Ints, each, ints, shard_length
from ..model import Plan, Undecided
from ..pictures import Bars, ranges_of
from ..pieces import Pieces, pieces_of
from .check import Check, finding, many, more

MOST_VISITS = 8_000_000  # of a query by a call; more would take gigabytes

MOST_BETWEEN = 100_000  # queries among which the first wrong one is searched


@dataclass(frozen=True)
class Visits:
    """Queries to check, each with the range of keys that a call shows it."""

    query: Ints  # its number times the number of shards, plus the shard of these keys
    piece: Ints
    first: Ints
    keys: Ints
    step: Ints


def coverage(plan: Plan) -> list[Finding]:
    """Check that every query sees every visible key once."""
    pieces = _inside(plan, pieces_of(plan))
    if plan.shards > 1 and (pieces.source >= 0).any():
        raise Undecided("keys of other ranks are judged where caches are not shared out")
    everywhere, shards = plan.everywhere, np.ones(plan.shards, bool)
    apart = everywhere[pieces.request]
    if fault := _judged(plan, pieces[~apart], ~everywhere, shards):
        return fault
    if not everywhere.any():
        return []
    if plan.shards > 1:
        return _of_copies(plan, pieces[apart], everywhere)

    def judged(ranks: list[int]) -> list[Finding]:
        return _judged(plan, pieces[apart & np.isin(pieces.rank, ranks)], everywhere, shards)

    calling = [rank for rank, said in enumerate(plan.ranks) if "segments" in said]
    heads = [plan.ranks[rank].get("heads") for rank in calling]
    if plan.cache.get("shared", False):
        return judged(calling)
    if None not in heads:
        return next(filter(None, map(judged, _of_equal_heads(calling, heads))), [])
    # Unknown whether ranks share the keys, or each has all keys for its own heads.
    if not (together := judged(calling)):
        return []
    alone = [judged([rank]) for rank in calling]
    return together if all(alone) else next(filter(None, alone), [])


def _of_equal_heads(ranks: list[int], heads: list[Any]) -> list[list[int]]:
    """Return ranks that compute the same heads, which see all keys together."""
    found: dict[Any, list[int]] = {}
    for rank, mine in zip(ranks, heads, strict=True):
        found.setdefault((mine.get("group", 0), *mine["q"]), []).append(rank)
    return list(found.values())


def _of_copies(plan: Plan, pieces: Pieces, requests: NDArray[np.bool_]) -> list[Finding]:
    """Return copies: ranks with the whole cache together, if ranks of a shard split heads."""
    copy, said = plan.copy_by_rank("segments"), np.array(["segments" in r for r in plan.ranks])
    for number in np.unique(copy[said]):
        own = plan.shard_by_rank[said & (copy == number)]
        wanted = np.isin(np.arange(plan.shards), own) | (number == 0)
        if fault := _judged(plan, pieces[copy[pieces.rank] == number], requests, wanted):
            return fault
    return []


def _judged(
    plan: Plan, pieces: Pieces, requests: NDArray[np.bool_], shards: NDArray[np.bool_]
) -> list[Finding]:
    """Check that the queries of some requests see each key of some shards once."""
    looked = _looked_at(plan, pieces)
    request = np.searchsorted(plan.token_base, looked, side="right") - 1
    looked = looked[requests[request]]
    if len(looked) * plan.shards > MOST_VISITS:
        raise Undecided(f"more than {MOST_VISITS:,} queries")
    visits = _visits(plan, pieces, looked)
    numbers = (looked[:, None] * plan.shards + np.flatnonzero(shards)).reshape(-1)
    wrong = _wrong(plan, visits, numbers)
    if not len(wrong):
        return []
    if plan.shards > 1:
        return _described_shard(plan, pieces, wrong)
    query = int(wrong[0])
    before = looked[looked < query]
    between = np.arange(int(before[-1]) + 1 if len(before) else query, query)[-MOST_BETWEEN:]
    between = between[requests[np.searchsorted(plan.token_base, between, side="right") - 1]]
    earlier = _wrong(plan, _visits(plan, pieces, between), between)
    return _described(plan, pieces, int(earlier[0]) if len(earlier) else query)


def _looked_at(plan: Plan, pieces: Pieces) -> Ints:
    """Return queries that decide for all: begins and ends of pieces and limits, and neighbours.

    If keys do not grow linearly, all queries: shards, rows or keys in different steps.
    """
    long = pieces[pieces.rows > 1]
    strides = np.unique(long.stride)
    step = int(strides[0]) if len(strides) else 1
    # Ends of ranges that grow by less than `step` could cross between two queries that fit.
    even = (long.move == 0) | (long.move == step) & ((long.move + long.slope) % step == 0)
    even &= long.key_step == 1
    if plan.shards > 1 or len(strides) > 1 or not (even.all() and (pieces.key_step == 1).all()):
        if plan.num_tokens > MOST_VISITS:
            raise Undecided(f"more than {MOST_VISITS:,} queries")
        return np.arange(plan.num_tokens)
    begin = plan.token_of(pieces.request, pieces.position)
    last = begin + (pieces.rows - 1) * step
    request, place = each(np.minimum(plan.extend, step))
    edges = [begin, last, begin - step, last + step]
    edges += [plan.token_base[request] + place, plan.token_base[request + 1] - 1 - place]
    for limit in _bends(plan):
        turn = plan.token_base[:-1] + np.clip(limit - plan.prefix, 0, plan.extend)
        edges += [turn[request] + place, turn[request] - 1 - place]
    looked = np.unique(np.concatenate(edges))
    return looked[(looked >= 0) & (looked < plan.num_tokens)]


def _bends(plan: Plan) -> list[Ints]:
    """Return positions at which a window begins to hide keys, before or behind."""
    bends = [] if plan.window is None else [np.full_like(plan.lengths, plan.window)]
    if not plan.causal and plan.window_right is not None:
        bends.append(plan.lengths - 1 - plan.window_right)
    return bends


def _inside(plan: Plan, pieces: Pieces) -> Pieces:
    """Return the pieces whose queries are all new tokens; other queries are another fault."""
    last = pieces.position + (pieces.rows - 1) * pieces.stride
    low, high = plan.prefix[pieces.request], plan.lengths[pieces.request]
    return pieces[(pieces.position >= low) & (last < high)]


def _visits(plan: Plan, pieces: Pieces, looked: Ints) -> Visits:
    """Return the checked queries of each piece, ascending in `looked`."""
    begin = plan.token_of(pieces.request, pieces.position)
    end = begin + (pieces.rows - 1) * pieces.stride + 1
    low, high = np.searchsorted(looked, begin), np.searchsorted(looked, end)
    if int((high - low).sum()) > MOST_VISITS:
        raise Undecided(f"queries see more than {MOST_VISITS:,} ranges of keys")
    piece, place = each(high - low)
    query = looked[low[piece] + place]
    row, rest = np.divmod(query - begin[piece], pieces.stride[piece])
    real = rest == 0
    piece, query, row = piece[real], query[real], row[real]
    shard = plan.shard_by_rank[pieces.rank[piece]]
    first = pieces.first[piece] + row * pieces.move[piece]
    keys = pieces.keys[piece] + row * pieces.slope[piece]
    return Visits(query * plan.shards + shard, piece, first, keys, pieces.key_step[piece])


def _limits(plan: Plan, query: Ints) -> tuple[Ints, Ints]:
    """Return begin and end of the keys of a shard that queries may see, in its numbering."""
    token, shard = np.divmod(query, plan.shards)
    request = np.searchsorted(plan.token_base, token, side="right") - 1
    position = token - plan.token_base[request] + plan.prefix[request]
    low, high = np.zeros_like(position), plan.lengths[request]
    if plan.window is not None:
        low = np.maximum(position - plan.window, 0)
    if plan.causal:
        high = position + 1
    elif plan.window_right is not None:
        high = np.minimum(high, position + 1 + plan.window_right)
    if plan.shards == 1:
        return low, high
    low, high = (shard_length(end, shard, plan.shards, plan.interleave) for end in (low, high))
    return low, high


def _wrong(plan: Plan, visits: Visits, looked: Ints) -> Ints:
    """Return the queries, ascending, that miss visible keys or see some keys twice."""
    step = _common_step(visits.step)
    copies = np.where(visits.step == step, 1, step)
    if int(copies.sum()) > MOST_VISITS:
        raise Undecided(f"queries see more than {MOST_VISITS:,} ranges of keys")
    visit, residue = each(copies)
    first = visits.first[visit] + residue
    keys = np.where(
        visits.step[visit] == step, visits.keys[visit], -((residue - visits.keys[visit]) // step)
    )
    query, seen = visits.query[visit], keys > 0
    query, first, keys = query[seen], first[seen], keys[seen]
    order = np.lexsort((first, first % step, query))
    query, first, keys = query[order], first[order], keys[order]
    low, high = _limits(plan, query)
    after = first + keys * step
    chain = query * step + first % step
    follows = np.concatenate([[False], chain[1:] == chain[:-1]])
    begins = low + (first - low) % step  # the first key in its residue class
    expected = np.where(follows, np.roll(after, 1), begins)
    ends = np.concatenate([chain[1:] != chain[:-1], [True]])[: len(chain)]
    bad = (first != expected) | (ends & ((after - step >= high) | (after < high)))
    listed = np.isin(query, looked)
    ends &= listed
    chains = np.bincount(np.searchsorted(looked, query[ends]), minlength=len(looked))
    wanted_low, wanted_high = _limits(plan, looked)
    short = chains != np.minimum(wanted_high - wanted_low, step)
    return np.unique(np.concatenate([query[bad & listed], looked[short]]))


def _common_step(steps: Ints) -> int:
    larger = np.unique(steps[steps > 1])
    if len(larger) > 1:
        raise Undecided(f"keys in steps of {larger[0]} and of {larger[1]}")
    return int(larger[0]) if len(larger) else 1


def _described(plan: Plan, pieces: Pieces, query: int) -> list[Finding]:
    """Report the fault of one query, key by key."""
    request, position = plan.place(query)
    visits = _visits(plan, pieces, np.array([query]))
    low, high = (int(limit[0]) for limit in _limits(plan, np.array([query])))
    shown = np.maximum(high - visits.first, 0) // visits.step + 2  # later ones are alike
    visit, place = each(np.clip(visits.keys, 0, shown))
    keys = np.minimum(visits.first[visit] + place * visits.step[visit], high)
    end = max(high, int(keys.max(initial=-1)) + 1)
    counts = np.bincount(keys, minlength=end)
    wrong = counts.copy()
    wrong[low:high] -= 1
    key = int(np.flatnonzero(wrong)[0])
    ranks = pieces.rank[visits.piece]
    seeing = np.unique(ranks[visit[keys == key]])
    others = many(int((wrong != 0).sum()) - 1, "more key")
    what = f"sees key {key}"
    if low <= key < high:
        what = f"counts key {key} {counts[key]} times" if counts[key] else f"never sees key {key}"
    what = f"position {position} of request {request} {what}, it may see {low} to {high - 1}"
    bars = Bars(0, max(end, 1), key)
    for number in np.unique(ranks):
        mine = keys[np.isin(visit, np.flatnonzero(ranks == number))]
        bars.add(f"rank {number} sees", ranges_of(mine))
    return finding(
        "cov-pair", what + ("" if others.startswith("no") else f"; {others} wrong"),
        f"request {request}, query {position}, key {key}", seeing if len(seeing) else ranks,
        bars.picture(), request=request, query=position, key=key, times=counts[key], low=low,
        high=high,
    )  # fmt: skip


def _described_shard(plan: Plan, pieces: Pieces, wrong: Ints) -> list[Finding]:
    """Return the finding about the first wrong query, with a line for each shard."""
    query, shard = divmod(int(wrong[0]), plan.shards)
    request, at = plan.place(query)
    visits = _visits(plan, pieces, ints([query]))
    low, high = _limits(plan, query * plan.shards + np.arange(plan.shards))
    seen = ints(np.bincount(visits.query % plan.shards, visits.keys, plan.shards))
    bad = np.isin(np.arange(plan.shards), wrong[wrong // plan.shards == query] % plan.shards)
    lines = [
        f"shard {s}  sees {seen[s]:>6} keys, may see {high[s] - low[s]:>6}" + "  <" * bool(bad[s])
        for s in range(min(plan.shards, 8))
    ]
    mine = visits.query % plan.shards == shard
    got, want = int(seen[shard]), int(high[shard] - low[shard])
    what = f"sees {got} keys of shard {shard}, which has {want} that it may see"
    where = min(got, want)
    if got == want:
        where = int(visits.first[mine].min())
        what = f"sees keys of shard {shard} from its {where}th, not from its {low[shard]}th"
    others = len(np.unique(wrong // plan.shards)) - 1
    return finding(
        "cov-shard", f"position {at} of request {request} {what}"
        + more(others, "query").replace("querys", "queries"),
        f"request {request}, query {at}, key {where} of shard {shard}",
        _showing(plan, pieces, shard), "\n".join(lines),
        request=request, query=at, shard=shard, keys=got, expected=want,
    )  # fmt: skip


def _showing(plan: Plan, pieces: Pieces, shard: int) -> Ints:
    """Return the ranks of a shard that make these calls, or all its ranks if none does."""
    ranks = np.flatnonzero(plan.shard_by_rank == shard)
    mine = ranks[np.isin(ranks, pieces.rank)]
    return mine if len(mine) else ranks


CHECKS = (Check("COV", "segments", coverage),)
