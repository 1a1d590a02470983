# SPDX-License-Identifier: Apache-2.0
"""LEN: a rank uses lengths of its own keys, existing rows, and its own pages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...findings import Finding
from ..intervals import Ints, each, first_of, ints, offsets, shard_length
from ..model import Absent, Plan, Undecided
from .check import Check, finding, more

MOST_PAIRS = 1_000_000  # of requests whose common prefixes are compared
MOST_ENTRIES = 50_000_000  # of tables; more take minutes


def key_lens(plan: Plan) -> list[Finding]:
    """Check that a rank counts exactly the keys of a request that its cache has."""
    if not any("key_lens" in rank for rank in plan.ranks):
        raise Absent("no rank has key_lens")
    for rank, said in enumerate(plan.ranks):
        if "key_lens" not in said:
            continue
        counts, kept = np.asarray(said["key_lens"], np.int64), plan.kept(rank)
        bad = first_of(counts != kept)
        if bad is not None:
            got, want, whole = int(counts[bad]), int(kept[bad]), int(plan.lengths[bad])
            hint = ", those of the whole sequence" if got == whole else ""
            return finding(
                "len-keys", f"rank {rank} counts {got} keys of request {bad}{hint}; its cache has "
                f"{want} of the {whole}" + more(int((counts != kept).sum()) - 1, "request"),
                f"request {bad}, key {max(min(got, want), 0)}", [rank], _table(plan, bad),
                request=bad, length=got, expected=want, whole=whole,
            )  # fmt: skip
    return []


def _table(plan: Plan, request: int) -> str:
    """Return lines with the key counts of the first ranks for a request, and the kept keys."""
    lines = []
    for rank, said in enumerate(plan.ranks[:8]):
        lens = said.get("key_lens")
        got, want = lens[request] if lens else None, int(plan.kept(rank)[request])
        wrong = "" if got in (None, want) else "  <"
        lines.append(
            f"rank {rank}  counts {'-' if got is None else got:>8}, keeps {want:>8}{wrong}"
        )
    return "\n".join(
        [*lines, *([f"({len(plan.ranks) - 8} more ranks)"] if len(plan.ranks) > 8 else [])]
    )


def segments(plan: Plan) -> list[Finding]:
    """Check that calls take existing rows, and no more keys than the rank has."""
    calls, rows = plan.segments, plan.rows
    have = np.diff(plan.row_base(rows))[calls["rank"]]
    bad = first_of(calls["row"] + calls["rows"] > have)
    if bad is not None:
        rank, end = int(calls["rank"][bad]), int((calls["row"] + calls["rows"])[bad])
        return finding(
            "len-rows", f"a call takes rows up to {end - 1} of rank {rank}, which has {have[bad]}",
            f"request {calls['request'][bad]}, row {have[bad]}", [rank], rows=end, have=have[bad],
        )  # fmt: skip
    bad = first_of(calls["keys"] < 0)
    if bad is not None:
        return finding(
            "len-keys", f"a call of rank {calls['rank'][bad]} has {calls['keys'][bad]} keys",
            f"request {calls['request'][bad]}, row {calls['row'][bad]}", [calls["rank"][bad]],
            keys=calls["keys"][bad],
        )  # fmt: skip
    return _too_many_keys(plan) or _more_than_sent(plan)


def _too_many_keys(plan: Plan) -> list[Finding]:
    """Report a call that reads more keys than the cache of the rank has."""
    calls = plan.segments
    shard = plan.shard_by_rank[calls["rank"]]
    whole = (plan.lengths + plan.pad)[calls["request"]]
    own = shard_length(whole, shard, plan.shards, plan.interleave)
    end = calls["first"] + calls["keys"]
    bad = first_of((end > own) & (calls["from"] < 0))
    if bad is None:
        return []
    rank, request = int(calls["rank"][bad]), int(calls["request"][bad])
    hint = ", as many as the whole sequence" if plan.shards > 1 and end[bad] == whole[bad] else ""
    return finding(
        "len-keys", f"a call of rank {rank} reads {end[bad]} keys of request {request}{hint}; "
        f"its cache has {own[bad]} of {whole[bad]}", f"request {request}, key {own[bad]}", [rank],
        f"reads  {end[bad]:>8} keys\nhas    {own[bad]:>8} of its own, of {whole[bad]}",
        request=request, keys=end[bad], expected=own[bad], whole=whole[bad],
    )  # fmt: skip


def _more_than_sent(plan: Plan) -> list[Finding]:
    """Report a call that takes more keys of another rank than that has rows without padding."""
    calls, rows = plan.segments, plan.rows
    real, count = rows["request"] >= 0, len(plan.requests)
    owner = rows["rank"][real] * count + rows["request"][real]
    owners, places = np.unique(owner, return_inverse=True)
    sums = np.bincount(places, weights=rows["count"][real]).astype(np.int64)
    wanted = calls["from"] * count + calls["request"]
    place = np.searchsorted(owners, wanted)
    known = np.isin(wanted, owners)
    have = np.zeros(len(wanted), np.int64)
    have[known] = sums[place[known]]
    end = calls["first"] + calls["keys"]
    bad = first_of((calls["from"] >= 0) & (calls["rows"] > 0) & (end > have))
    if bad is None:
        return []
    rank, request, source = (int(calls[name][bad]) for name in ("rank", "request", "from"))
    return finding(
        "len-keys", f"a call of rank {rank} takes {end[bad]} keys of request {request} from rank "
        f"{source}, which has {have[bad]}", f"request {request}, row {calls['row'][bad]}",
        [rank, source], request=request, keys=end[bad], expected=have[bad],
    )  # fmt: skip


def tables(plan: Plan) -> list[Finding]:
    """Check that tables have a page for every used key, in bounds, and share no page."""
    if "page_size" not in plan.cache or not any(plan.table(r) for r in range(len(plan.ranks))):
        raise Absent("no rank has tables")
    common = "tables" in plan.cache and not any("tables" in rank for rank in plan.ranks)
    ranks: Iterable[int] = range(len(plan.ranks))
    if common:  # ranks of one shard have the same pages
        ranks = sorted(np.unique(plan.shard_by_rank, return_index=True)[1].tolist())
        if len(ranks) * sum(map(len, plan.cache["tables"])) > MOST_ENTRIES:
            raise Undecided(f"tables of all shards have more than {MOST_ENTRIES:,} pages")
    for rank in ranks:
        if plan.table(rank) is not None and (fault := _table_of(plan, rank)):
            return fault
    return []


def _table_of(plan: Plan, rank: int) -> list[Finding]:
    page_size, table = int(plan.cache["page_size"]), plan.table(rank) or []
    needed = -(-plan.kept(rank) // page_size)
    widths = np.array([len(row) for row in table], np.int64)
    bad = first_of(widths < needed)
    if bad is not None:
        return finding(
            "len-pages", f"rank {rank} has {widths[bad]} pages for request {bad}, its "
            f"{plan.kept(rank)[bad]} keys need {needed[bad]}", f"request {bad}, page "
            f"{widths[bad]} of its table", [rank], request=bad, pages=widths[bad],
            expected=needed[bad],
        )  # fmt: skip
    request, column = each(needed)
    used = column >= _freed(plan, rank, page_size)[request]
    request, column = request[used], column[used]
    flat = np.concatenate([np.asarray(row, np.int64) for row in table] or [np.array([], np.int64)])
    page = flat[offsets(widths)[request] + column]
    limit = plan.cache.get("num_pages", np.iinfo(np.int64).max)
    bad = first_of((page < 0) | (page >= limit))
    if bad is not None:
        return finding(
            "len-pages", f"rank {rank} keeps keys of request {request[bad]} on page {page[bad]}, "
            f"there are {limit}", f"request {request[bad]}, page {column[bad]} of its table",
            [rank], request=request[bad], column=column[bad], page=page[bad], pages=limit,
        )  # fmt: skip
    bad = first_of(page == plan.cache.get("padding_page", -1))
    if bad is not None:
        return finding(
            "len-pages", f"rank {rank} keeps keys of request {request[bad]} on page {page[bad]}, "
            "which is for padding", f"request {request[bad]}, page {column[bad]} of its table",
            [rank], request=request[bad], column=column[bad], page=page[bad],
        )  # fmt: skip
    return _shared_pages(plan, rank, request, column, page)


def _freed(plan: Plan, rank: int, page_size: int) -> Ints:
    """Count first pages of each request that no query sees, which a cache may free."""
    if plan.window is None:
        return np.zeros_like(plan.lengths)
    first = np.maximum(plan.prefix - plan.window, 0)
    return shard_length(first, plan.shard(rank), plan.shards, plan.interleave) // page_size


def _shared_pages(
    plan: Plan, rank: int, request: np.ndarray, column: np.ndarray, page: np.ndarray
) -> list[Finding]:
    """Check that only requests with equal beginnings share a page."""
    order = np.lexsort((request, page))
    same = page[order][1:] == page[order][:-1]
    one, two = order[:-1][same], order[1:][same]
    span = int(plan.cache["page_size"]) * plan.shards
    ends = (column[two] + 1) * span
    pairs, places = np.unique(request[np.stack([one, two])], axis=1, return_inverse=True)
    known: dict[tuple[int, int], int] = {}
    alike = [_alike(plan, first, second, known) for first, second in pairs.T.tolist()]
    allowed = ints(alike)[places.reshape(-1)]
    bad = first_of((column[one] != column[two]) | (request[one] == request[two]) | (ends > allowed))
    if bad is None:
        return []
    a, b = one[bad], two[bad]
    first = int(min(allowed[bad], column[b] * span + span - 1))
    return finding(
        "len-pages", f"page {page[a]} of rank {rank} is page {column[a]} of request {request[a]} "
        f"and page {column[b]} of request {request[b]}, which are alike in {max(allowed[bad], 0)} "
        f"tokens, not {ends[bad]}", f"request {request[b]}, position {first}", [rank],
        f"request {request[a]}  page {column[a]} -> {page[a]}\n"
        f"request {request[b]}  page {column[b]} -> {page[b]}",
        page=page[a], requests=[request[a], request[b]], common=allowed[bad], needed=ends[bad],
    )  # fmt: skip


def _alike(plan: Plan, one: int, two: int, known: dict[tuple[int, int], int]) -> int:
    """Count the leading tokens that two requests share, as far as the document tells.

    `known` has the results for other pairs, which are steps of this search.
    """
    steps = []
    alike = int(plan.lengths.max())
    while one != two:
        one, two = sorted((one, two))
        if (one, two) in known:
            alike = known[one, two]
            break
        cached = int(min(plan.prefix[one], plan.prefix[two]))
        shares = plan.requests[two].get("shares")
        if shares is None:
            alike = known[one, two] = cached
            break
        steps.append((one, two, shares["tokens"], cached))
        two = shares["request"]
        if len(known) + len(steps) > MOST_PAIRS:
            raise Undecided(f"more than {MOST_PAIRS:,} pairs of requests that may share pages")
    for first, second, tokens, cached in reversed(steps):
        alike = known[first, second] = min(tokens, max(alike, cached))
    return alike


CHECKS = (
    Check("LEN", "key_lens", key_lens),
    Check("LEN", "segments", segments),
    Check("LEN", "tables", tables),
)
