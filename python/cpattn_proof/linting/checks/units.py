# SPDX-License-Identifier: Apache-2.0
"""OWN and COV of units of several rows: each is computed once, from all its rows."""

from __future__ import annotations

import numpy as np

from ...findings import Finding
from ..intervals import Ints, each, first_of, offsets
from ..model import Absent, Columns, Plan
from .check import Check, finding, many, more


def _given(plan: Plan) -> tuple[Columns, int, int]:
    """Return runs of rows by rank, request and unit, in order, and ratio and window."""
    if "units" not in plan.document:
        raise Absent("the document has no units")
    names = dict.fromkeys(("request", "unit", "position", "count"))
    runs = plan.gathered("units", names | {"source": -1})
    order = np.lexsort([runs[name] for name in ("position", "unit", "request", "rank")])
    rule = plan.document["units"]
    return {name: values[order] for name, values in runs.items()}, rule["ratio"], rule["window"]


def _begins(runs: Columns) -> Ints:
    """Return the begin of the runs of each unit of a rank."""
    changes = [np.diff(runs[name], prepend=-1) != 0 for name in ("rank", "request", "unit")]
    return np.flatnonzero(np.logical_or.reduce(changes))


def owners(plan: Plan) -> list[Finding]:
    """Check that one rank computes each unit that new tokens complete, and no other unit.

    All ranks compute it if each has all queries of the request.
    """
    runs, ratio, _ = _given(plan)
    begins = _begins(runs)
    request, unit, rank = (runs[name][begins] for name in ("request", "unit", "rank"))
    first = plan.prefix // ratio
    counts = plan.lengths // ratio - first
    base = offsets(counts)
    place = unit - first[request]
    bad = first_of((place < 0) | (place >= counts[request]))
    if bad is not None:
        r, u = int(request[bad]), int(unit[bad])
        return finding(
            "own-unit", f"rank {rank[bad]} computes unit {u} of request {r}, which new tokens do "
            "not complete", f"request {r}, unit {u}", [rank[bad]], request=r, unit=u,
        )  # fmt: skip
    times = np.bincount(base[request] + place, minlength=int(base[-1]))
    wanted = np.repeat(np.where(plan.everywhere, len(plan.ranks), 1), counts)
    bad = first_of(times != wanted)
    if bad is None:
        return []
    owner, into = each(counts)
    r, u = int(owner[bad]), int(into[bad] + first[owner[bad]])
    holders = rank[(request == r) & (unit == u)]
    return finding(
        "own-unit",
        f"unit {u} of request {r} is computed by {many(len(holders), 'rank')}, not {wanted[bad]}"
        + more(int((times != wanted).sum()) - 1, "unit"), f"request {r}, unit {u}", holders,
        request=r, unit=u, times=len(holders), units=int((times != wanted).sum()),
    )  # fmt: skip


def rows(plan: Plan) -> list[Finding]:
    """Check that every unit is computed from all its rows, each once and in order."""
    runs, ratio, window = _given(plan)
    begins = _begins(runs)
    sizes = np.diff(np.append(begins, len(runs["unit"])))
    end = (runs["unit"] + 1) * ratio
    source = np.where(runs["source"] < 0, runs["request"], runs["source"])
    reached = np.roll(runs["position"] + runs["count"], 1)  # by the previous run
    reached[begins] = np.maximum(end - window, 0)[begins]
    last = np.repeat(begins + sizes - 1, sizes)
    wrong = (source != runs["request"]) | (runs["position"] != reached)
    wrong |= (np.arange(len(end)) == last) & (runs["position"] + runs["count"] != end)
    bad = first_of(wrong)
    if bad is None:
        return []
    r, u, rank = (int(runs[name][bad]) for name in ("request", "unit", "rank"))
    mine = (runs["request"] == r) & (runs["unit"] == u) & (runs["rank"] == rank)
    found = ", ".join(
        f"{p} to {p + n - 1}" + (f" of request {s}" if s != r else "")
        for p, n, s in zip(
            runs["position"][mine], runs["count"][mine], source[mine], strict=True
        )
    )  # fmt: skip
    stop = int(end[bad])
    begin = max(stop - window, 0)
    return finding(
        "cov-unit", f"unit {u} of request {r} is computed of rows {found}, not {begin} to "
        f"{stop - 1}" + more(len(np.unique(last[wrong])) - 1, "unit"),
        f"request {r}, unit {u}", [rank], request=r, unit=u, begin=begin, end=stop,
    )  # fmt: skip


CHECKS = (Check("OWN", "units", owners), Check("COV", "units", rows))
