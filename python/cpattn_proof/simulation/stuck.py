# SPDX-License-Identifier: Apache-2.0
"""Deadlocks, with the reason why no rank can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..findings import Finding
from .calls import Call, Site
from .fabric import Fabric


@dataclass(frozen=True)
class Waiting:
    """Line at which a rank waits, and the event that it waits for."""

    site: Site
    what: str
    call: Call | None = None


def finding_of(waiting: Mapping[int, Waiting], over: Sequence[int], fabric: Fabric) -> Finding:
    """Return the finding of a deadlock: where each rank waits, for what, and why in vain."""
    awaited = {
        rank: fabric.waits_for(one.call) if one.call else [] for rank, one in waiting.items()
    }
    gone = sorted({other for others in awaited.values() for other in others} & set(over))
    lines = []
    for rank in sorted([*waiting, *over]):
        if rank in over:
            lines.append((f"rank {rank}", "has returned", ""))
        else:
            one = waiting[rank]
            whom = ", ".join(map(str, awaited[rank]))
            reason = f"{one.what}, needs rank {whom}" if whom else one.what
            lines.append((f"rank {rank}", str(one.site), reason))
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    picture = "\n".join(
        f"{rank:<{widths[0]}}  {place:<{widths[1]}}  {why}".rstrip() for rank, place, why in lines
    )
    who = ", ".join(map(str, sorted(waiting)))
    first = min(waiting)
    return Finding(
        "SEQ",
        f"rank {who} wait{'s' * (len(waiting) == 1)} for ever: {_why(waiting, awaited, gone)}",
        where=str(waiting[first].site),
        ranks=tuple(sorted(waiting)),
        picture=picture,
        advice=_advice(waiting),
        kind="rank-returned" if gone else "deadlock",
        details={
            "waiting": [
                {
                    "rank": rank,
                    "file": one.site.file,
                    "line": one.site.line,
                    "for": one.what,
                    "needs": awaited[rank],
                }
                for rank, one in sorted(waiting.items())
            ],
            "returned": list(over),
        },
    )


def _why(
    waiting: Mapping[int, Waiting], awaited: Mapping[int, Sequence[int]], gone: Sequence[int]
) -> str:
    if gone:
        verb = "has" if len(gone) == 1 else "have"
        return f"rank {', '.join(map(str, gone))} {verb} returned"
    if circle := _circle(awaited):
        return "each needs the next of ranks " + ", ".join(map(str, circle))
    return "nobody brings " + next(one.what for _, one in sorted(waiting.items()))


def _circle(awaited: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks in a circle, each of which waits for the next."""
    path = [min(awaited)]
    while following := [other for other in awaited.get(path[-1], ()) if other in awaited]:
        if following[0] in path:
            return [*path[path.index(following[0]) :], following[0]]
        path.append(following[0])
    return []


def _advice(waiting: Mapping[int, Waiting]) -> str:
    calls = [one.call for one in waiting.values()]
    if all(call is not None and call.is_message and call.gives for call in calls):
        return (
            "Let some ranks receive first, or use isend or batch_isend_irecv; small sends pass "
            "over gloo alone (--buffered-sends)."
        )
    return ""
