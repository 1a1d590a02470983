# SPDX-License-Identifier: Apache-2.0
"""OWN of tokens: each has one rank, its own position, and its place in the restored order."""

from __future__ import annotations

import numpy as np

from ...findings import Finding
from ..intervals import MOST_MEMBERS, Ints, each, first_of, ints, tally
from ..model import Absent, Columns, Plan, Undecided
from ..pictures import Bars
from .check import Check, finding, many, more

MOST_DRAWN = 100_000  # tokens of all ranks, drawn one by one


def picture_of_rows(plan: Plan, request: int, mark: int | None = None) -> str:
    """Draw which ranks have the new tokens of a request, only around the mark if many."""
    begin, end = int(plan.prefix[request]), int(plan.lengths[request])
    most = max(MOST_DRAWN // max(len(plan.ranks), 1), 1000)
    if end - begin > most and (plan.rows["step"] > 1).any():
        begin = min(max((mark or 0) - most // 2, begin), end - most)
        end = begin + most
    bars, rows = Bars(begin, max(end, begin + 1), mark), plan.rows
    for rank in range(len(plan.ranks)):
        mine = (rows["rank"] == rank) & (rows["request"] == request)
        first, count, step = (rows[name][mine] for name in ("position", "count", "step"))
        skipped = np.clip(-((first - begin) // step), 0, count) * (step > 1)
        count = np.where(step > 1, np.clip(-((first - end) // step), skipped, count), count)
        first, count = first + skipped * step, count - skipped
        run, place = each(np.where(step == 1, np.minimum(count, 1), count))
        low = first[run] + place * step[run]
        bars.add(f"rank {rank}", np.stack([low, low + np.where(step == 1, count, 1)[run]], axis=1))
    return bars.picture()


def tokens(plan: Plan) -> list[Finding]:
    """Check that each new token is a row of one rank, or of every rank with all queries."""
    rows = plan.rows
    if not plan.requests:
        raise Absent("the document has no requests")
    real = (rows["request"] >= 0) & (rows["count"] > 0)
    runs = {name: values[real] for name, values in rows.items()}
    if outside := _outside(plan, runs):
        return outside
    edges, counts = _owners(plan, runs)
    bad = first_of(counts)
    if bad is None:
        return []
    request, position = plan.place(int(edges[bad]) % plan.num_tokens)
    sizes = np.diff(edges)
    lost, doubled = (int(sizes[of[:-1]].sum()) for of in (counts < 0, counts > 0))
    into, rest = np.divmod(position - runs["position"], runs["step"])
    here = (runs["request"] == request) & (rest == 0) & (into >= 0) & (into < runs["count"])
    holders = runs["rank"][here]
    what = f"position {position} of request {request} is on {many(len(holders), 'rank')}, not 1"
    if plan.everywhere[request]:
        holders = np.array([int(edges[bad]) // plan.num_tokens])
        times = int(counts[bad]) + 1
        what = f"rank {holders[0]} has position {position} of request {request} {times} times"
    elif len(set(holders.tolist())) < len(holders):
        what = f"position {position} of request {request} is {len(holders)} rows, not 1"
    alike, others = (lost, doubled) if counts[bad] < 0 else (doubled, lost)
    what += more(alike - 1, "token")
    if others:
        name = "doubled" if counts[bad] < 0 else "lost"
        what += f"; {many(others, 'other')} {'is' if others == 1 else 'are'} {name}"
    return finding(
        "own-token", what, f"request {request}, position {position}", holders,
        picture_of_rows(plan, request, position), request=request, position=position,
        times=len(holders), tokens=lost + doubled, lost=lost, doubled=doubled,
    )  # fmt: skip


def _owners(plan: Plan, runs: Columns) -> tuple[Ints, Ints]:
    """Count the surplus ranks of each token, as edges and counts.

    Tokens of requests that each rank has count once for each rank.
    """
    total, everywhere = plan.num_tokens, plan.everywhere
    begin = plan.token_of(runs["request"], runs["position"])
    begin = begin + runs["rank"] * total * everywhere[runs["request"]]
    copies = len(plan.ranks) if everywhere.any() else 1
    turns = np.flatnonzero(np.diff(everywhere, prepend=~everywhere[:1]))
    repeats = np.where(everywhere[turns], copies, 1)
    turn, copy = each(repeats)
    begins, ends = plan.token_base[turns], plan.token_base[np.append(turns[1:], len(everywhere))]
    wanted = np.stack([begins, ends], axis=1)[turn] + (copy * total)[:, None]
    if (runs["step"] == 1).all():
        return tally(begin, begin + runs["count"], wanted)
    if copies * total > MOST_MEMBERS:
        raise Undecided(f"{total:,} tokens in steps on {copies:,} ranks")
    edges, expected = tally(ints([]), ints([]), wanted)
    counts = np.bincount(_flat(runs | {"begin": begin}, "begin"), minlength=copies * total)
    counts = counts + np.repeat(expected[:-1], np.diff(edges))
    return np.arange(len(counts) + 1), np.append(counts, 0)


def _outside(plan: Plan, runs: Columns) -> list[Finding]:
    """Report a run of tokens that are not new tokens of its request."""
    last = runs["position"] + (runs["count"] - 1) * runs["step"]
    low, high = plan.prefix[runs["request"]], plan.lengths[runs["request"]]
    bad = first_of((runs["count"] > 0) & ((runs["position"] < low) | (last >= high)))
    if bad is None:
        return []
    request, rank = int(runs["request"][bad]), int(runs["rank"][bad])
    begin, end = int(low[bad]), int(high[bad])
    first = int(runs["position"][bad])
    wrong = first if first < begin else int(last[bad])
    return finding(
        "own-token", f"rank {rank} has position {wrong} of request {request}, whose new tokens "
        f"are {begin} to {end - 1}", f"request {request}, position {wrong}", [rank],
        picture_of_rows(plan, request), request=request, position=wrong, begin=begin, end=end,
    )  # fmt: skip


def _flat(runs: Columns, name: str) -> Ints:
    source, place = each(runs["count"])
    return runs[name][source] + place * runs["step"][source]


def positions(plan: Plan) -> list[Finding]:
    """Check that attention uses the token's own position for each row."""
    said = plan.gathered("positions", {"position": None, "count": None, "step": 1})
    rows = plan.rows
    for runs in (rows, said):
        if (total := int(runs["count"].sum())) > MOST_MEMBERS:
            raise Undecided(f"{total:,} rows one by one, of {MOST_MEMBERS:,} at most")
    for rank in range(len(plan.ranks)):
        if "positions" not in plan.ranks[rank]:
            continue
        mine = {name: values[rows["rank"] == rank] for name, values in rows.items()}
        theirs = {name: values[said["rank"] == rank] for name, values in said.items()}
        held, taken = _flat(mine, "position"), _flat(theirs, "position")
        owner = mine["request"][each(mine["count"])[0]]
        if len(held) != len(taken):
            return finding(
                "own-position", f"rank {rank} has {len(held)} rows, and positions of {len(taken)}",
                f"row {min(len(held), len(taken))}", [rank], rows=len(held), positions=len(taken),
            )  # fmt: skip
        bad = first_of((held != taken) & (owner >= 0))
        if bad is not None:
            request, wrong = int(owner[bad]), int(((held != taken) & (owner >= 0)).sum())
            return finding(
                "own-position", f"row {bad} is position {held[bad]}, attention takes it for "
                f"{taken[bad]}" + more(wrong - 1, "row"),
                f"request {request}, position {held[bad]}", [rank],
                picture_of_rows(plan, request, int(held[bad])),
                request=request, row=bad, position=held[bad], taken_for=taken[bad], rows=wrong,
            )  # fmt: skip
    return []


def restored(plan: Plan) -> list[Finding]:
    """Check that the restored rows of all ranks are the tokens in order."""
    if "restore" not in plan.document:
        raise Absent("the document has no restore")
    given = plan.document["restore"]
    names = ("rank", "row", "count")
    runs = {name: np.asarray(given[name], np.int64) for name in names}
    runs["step"] = np.asarray(given.get("step", [1] * len(given["rank"])), np.int64)
    rank = runs["rank"][each(runs["count"])[0]]
    base = plan.row_base(plan.rows)
    at = base[rank] + _flat(runs, "row")
    outside = first_of(at >= base[rank + 1])
    if outside is not None:
        owner = int(rank[outside])
        row, count = int(at[outside] - base[owner]), int(base[owner + 1] - base[owner])
        return finding(
            "own-restore", f"row {row} of rank {owner} is wanted, which has {count}",
            f"row {row}", [owner], row=row, rows=count,
        )  # fmt: skip
    if len(at) != plan.num_tokens:
        return finding(
            "own-restore", f"{len(at)} rows are put together, of {plan.num_tokens} tokens",
            f"token {min(len(at), plan.num_tokens)} of the batch", rows=len(at),
            tokens=plan.num_tokens,
        )  # fmt: skip
    return _in_order(plan, rank, at)


def _in_order(plan: Plan, rank: Ints, at: Ints) -> list[Finding]:
    """Check that rows, by index among the rows of all ranks, are all tokens in order."""
    source, _ = each(plan.rows["count"])
    request, position = plan.rows["request"][source][at], _flat(plan.rows, "position")[at]
    token = np.where(request >= 0, plan.token_of(request, position), -1)
    wrong = token != np.arange(plan.num_tokens)
    bad = first_of(wrong)
    if bad is None:
        return []
    request_of, position_of = plan.place(bad)
    text = f"position {position[bad]} of request {request[bad]}"
    text = text if request[bad] >= 0 else "a row of padding"
    return finding(
        "own-restore", f"position {position_of} of request {request_of} comes back as {text}"
        + more(int(wrong.sum()) - 1, "token"), f"request {request_of}, position {position_of}",
        [rank[bad]], picture_of_rows(plan, request_of, position_of),
        request=request_of, position=position_of, tokens=wrong.sum(),
    )  # fmt: skip


CHECKS = (
    Check("OWN", "rows", tokens),
    Check("OWN", "positions", positions),
    Check("OWN", "restore", restored),
)
