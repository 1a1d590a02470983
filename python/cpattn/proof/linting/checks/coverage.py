# SPDX-License-Identifier: Apache-2.0
"""COV: what queries see, over all calls of all ranks, is every key that they may see, once.

Between two places where calls begin or end, the keys of each call grow evenly from query to query.
Where they fit at both of its ends they fit within, so few queries of a long sequence are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...findings import Finding
from ..intervals import Ints, each, first_of, shard_length
from ..model import Absent, Plan
from ..pictures import Bars, ranges_of
from ..pieces import Pieces, pieces_of
from .check import Check, finding, many, more

MOST_VISITS = 30_000_000  # of a query by a call; more would not fit into memory


@dataclass(frozen=True)
class Visits:
    """Queries that are looked at, each with a range of keys that a call shows it."""

    query: Ints  # the number of the token
    piece: Ints
    first: Ints
    keys: Ints
    step: Ints


def coverage(plan: Plan) -> list[Finding]:
    """Every query sees every key that it may see once."""
    pieces = pieces_of(plan)
    if plan.shards > 1:
        return _of_shards(plan, pieces)
    inside = _inside(plan, pieces)
    looked = _looked_at(plan, inside)
    visits = _visits(plan, inside, looked)
    query = _first_bad(plan, visits, looked)
    return [] if query is None else _described(plan, inside, int(query))


def _looked_at(plan: Plan, pieces: Pieces) -> Ints:
    """Queries that decide for all: those where a piece begins or ends, and their neighbours.

    All queries where keys do not grow evenly: windows, no mask, rows or keys in different steps.
    """
    strides = np.unique(pieces.stride[pieces.rows > 1])
    even = len(strides) < 2 and bool((pieces.key_step == 1).all())
    if plan.window is not None or not even or not plan.causal:
        return np.arange(plan.num_tokens)
    step = int(strides[0]) if len(strides) else 1
    begin = plan.token_of(pieces.request, pieces.position)
    last = begin + (pieces.rows - 1) * step
    request, place = each(np.minimum(plan.extend, step))
    edges = [begin, last, begin - step, last + step]
    edges += [plan.token_base[request] + place, plan.token_base[request + 1] - 1 - place]
    looked = np.unique(np.concatenate(edges))
    return looked[(looked >= 0) & (looked < plan.num_tokens)]


def _inside(plan: Plan, pieces: Pieces) -> Pieces:
    """Without queries that are no new tokens, which is another fault."""
    last = pieces.position + (pieces.rows - 1) * pieces.stride
    low, high = plan.prefix[pieces.request], plan.lengths[pieces.request]
    return pieces[(pieces.position >= low) & (last < high)]


def _visits(plan: Plan, pieces: Pieces, looked: Ints) -> Visits:
    """The looked at queries of each piece, ascending in `looked`."""
    begin = plan.token_of(pieces.request, pieces.position)
    end = begin + (pieces.rows - 1) * pieces.stride + 1
    low, high = np.searchsorted(looked, begin), np.searchsorted(looked, end)
    if int((high - low).sum()) > MOST_VISITS:
        raise Absent(f"queries see more than {MOST_VISITS:,} ranges of keys")
    piece, place = each(high - low)
    query = looked[low[piece] + place]
    row, rest = np.divmod(query - begin[piece], pieces.stride[piece])
    real = rest == 0
    piece, query, row = piece[real], query[real], row[real]
    keys = pieces.keys[piece] + row * pieces.slope[piece]
    first = pieces.first[piece]
    if plan.window is not None:
        if not plan.causal:
            raise Absent("windows are judged under a causal mask")
        if (pieces.source >= 0).any():
            raise Absent("windows are judged where keys are those of the cache")
        hidden = np.maximum(keys - 1 - plan.window, 0)
        first, keys = first + hidden, keys - hidden
    return Visits(query, piece, first, keys, pieces.key_step[piece])


def _limits(plan: Plan, query: Ints) -> tuple[Ints, Ints]:
    """The keys that queries may see: from, and up to."""
    request = np.searchsorted(plan.token_base, query, side="right") - 1
    position = query - plan.token_base[request] + plan.prefix[request]
    high = position + 1 if plan.causal else plan.lengths[request]
    low = np.zeros_like(high) if plan.window is None else np.maximum(position - plan.window, 0)
    return low, high


def _first_bad(plan: Plan, visits: Visits, looked: Ints) -> int | None:
    """The first query that does not see what it may see, or sees some of it twice."""
    step = _common_step(visits.step)
    copies = np.where(visits.step == step, 1, step)
    if int(copies.sum()) > MOST_VISITS:
        raise Absent(f"queries see more than {MOST_VISITS:,} ranges of keys")
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
    begins = low + (first - low) % step  # the first key of its kind
    expected = np.where(follows, np.roll(after, 1), begins)
    ends = np.concatenate([chain[1:] != chain[:-1], [True]])[: len(chain)]
    bad = (first != expected) | (ends & ((after - step >= high) | (after < high)))
    chains = np.bincount(np.searchsorted(looked, query[ends]), minlength=len(looked))
    wanted_low, wanted_high = _limits(plan, looked)
    short = chains != np.minimum(wanted_high - wanted_low, step)
    wrong = np.concatenate([query[bad], looked[short]])
    return int(wrong.min()) if len(wrong) else None


def _common_step(steps: Ints) -> int:
    larger = np.unique(steps[steps > 1])
    if len(larger) > 1:
        raise Absent(f"keys in steps of {larger[0]} and of {larger[1]}")
    return int(larger[0]) if len(larger) else 1


def _described(plan: Plan, pieces: Pieces, query: int) -> list[Finding]:
    """What is wrong with one query, key by key."""
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
    if low <= key < high:
        what = f"counts key {key} {counts[key]} times" if counts[key] else f"never sees key {key}"
        what = f"position {position} of request {request} {what}, it may see {low} to {high - 1}"
    else:
        what = (
            f"position {position} of request {request} sees key {key}, after its last, {high - 1}"
        )
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


def _of_shards(plan: Plan, pieces: Pieces) -> list[Finding]:
    """Each shard shows every query those of its own keys that the query may see."""
    if (pieces.source >= 0).any() or (pieces.first > 0).any() or plan.window is not None:
        raise Absent("windows and keys of other ranks are judged where caches are not shared out")
    if not plan.causal:
        raise Absent("attention without a mask is judged where caches are not shared out")
    pieces = _inside(plan, pieces)
    if int(pieces.rows.sum()) + plan.num_tokens * plan.shards > MOST_VISITS:
        raise Absent(f"more than {MOST_VISITS:,} queries")
    if not plan.all_queries:
        return _of_copy(plan, pieces, np.ones(plan.shards, bool))
    # Ranks of one shard compute other heads: those that have the whole cache together are a copy.
    copy, said = plan.copy_by_rank("segments"), np.array(["segments" in r for r in plan.ranks])
    for number in np.unique(copy[said]):
        own = plan.shard_by_rank[said & (copy == number)]
        wanted = np.isin(np.arange(plan.shards), own) | (number == 0)
        if fault := _of_copy(plan, pieces[copy[pieces.rank] == number], wanted):
            return fault
    return []


def _of_copy(plan: Plan, pieces: Pieces, shards: NDArray[np.bool_]) -> list[Finding]:
    """The same of ranks among which each of some shards is once."""
    piece, row = each(pieces.rows)
    position = pieces.position[piece] + row * pieces.stride[piece]
    shard = plan.shard_by_rank[pieces.rank[piece]]
    query = plan.token_of(pieces.request[piece], position)
    seen = np.zeros((plan.num_tokens, plan.shards), np.int64)
    np.add.at(seen, (query, shard), pieces.keys[piece] + row * pieces.slope[piece])
    _, high = _limits(plan, np.arange(plan.num_tokens))
    wanted = shard_length(high[:, None], np.arange(plan.shards), plan.shards, plan.interleave)
    differs = (seen != wanted) & shards
    bad = first_of(differs.any(1))
    if bad is None:
        return []
    wrong = int(np.flatnonzero(differs[bad])[0])
    request, at = plan.place(bad)
    got, want = int(seen[bad, wrong]), int(wanted[bad, wrong])
    lines = [
        f"shard {s}  sees {seen[bad, s]:>6} keys, may see {wanted[bad, s]:>6}"
        + ("  <" if differs[bad, s] else "")
        for s in range(plan.shards)
    ]
    affected = int(differs.any(1).sum())
    return finding(
        "cov-shard", f"position {at} of request {request} sees {got} keys of shard {wrong}, which "
        f"has {want} up to it" + more(affected - 1, "query").replace("querys", "queries"),
        f"request {request}, query {at}, key {min(got, want)} of shard {wrong}",
        _showing(plan, pieces, wrong), "\n".join(lines[:8]),
        request=request, query=at, shard=wrong, keys=got, expected=want,
    )  # fmt: skip


def _showing(plan: Plan, pieces: Pieces, shard: int) -> Ints:
    """Ranks of a shard whose calls these are; all of the shard where they have none."""
    ranks = np.flatnonzero(plan.shard_by_rank == shard)
    mine = ranks[np.isin(ranks, pieces.rank)]
    return mine if len(mine) else ranks


CHECKS = (Check("COV", "segments", coverage),)
