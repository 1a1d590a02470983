# SPDX-License-Identifier: Apache-2.0
"""Findings of calls of ranks that do not fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from ..findings import Finding
from .calls import Call, Group, sizes_text


def picture_of(calls: Iterable[Call], marks: dict[int, str] | None = None) -> str:
    """Draw a line for each call: rank, place, call."""
    rows = [
        (f"rank {call.world_rank}", str(call.site), str(call), (marks or {}).get(call.rank, ""))
        for call in calls
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{rank:<{widths[0]}}  {place:<{widths[1]}}  {what}{f': {mark}' if mark else ''}"
        for rank, place, what, mark in rows
    )


def _finding(
    kind: str, what: str, calls: Sequence[Call], beside: Iterable[Call] = (), **marks: Any
) -> Finding:
    """Return a finding of some calls; its picture also has the calls `beside` them."""
    ordered = sorted(calls, key=lambda call: call.world_rank)
    shown = sorted({*calls, *beside}, key=lambda call: call.world_rank)
    return Finding(
        "SEQ",
        what,
        where=str(calls[-1].site),
        ranks=tuple(dict.fromkeys(call.world_rank for call in ordered)),
        picture=picture_of(shown, **marks),
        kind=kind,
        details={
            "calls": [
                {
                    "rank": call.world_rank,
                    "call": str(call),
                    "number": call.number,
                    "file": call.site.file,
                    "line": call.site.line,
                }
                for call in shown
            ]
        },
    )


def between(one: Call, other: Call, position: int, calls: Iterable[Call]) -> Finding | None:
    """Return the difference of two calls that should fit together, or None.

    `calls` are those of all ranks that have made one at this position.
    """
    if one.kind != other.kind:
        return _finding(
            "other-kind",
            f"{_nth(one, position)} is {one.kind} on rank {one.world_rank}, "
            f"{other.kind} on rank {other.world_rank}",
            (one, other),
            calls,
        )
    for name, value in one.terms.items():
        if (others := other.terms.get(name)) != value:
            return _finding(
                f"other-{name}",
                f"{_nth(one, position)}, {one.kind}, has {name} {value} on rank "
                f"{one.world_rank}, {others} on rank {other.world_rank}",
                (one, other),
                calls,
                marks={call.rank: f"{name} {call.terms.get(name)}" for call in calls},
            )
    pairs = ((one, other), (other, one)) if one is not other else ((one, one),)
    for giver, taker in pairs:
        given, taken = giver.gives.get(taker.rank, []), taker.expected_from(giver.rank)
        if not _fit(given, taken):
            return _of_sizes(giver, taker, position, calls)
    return None


def _nth(call: Call, position: int) -> str:
    return f"collective {position + 1} of {call.group}"


def _of_sizes(giver: Call, taker: Call, position: int, calls: Iterable[Call]) -> Finding:
    """Return the finding that one rank gives another size or dtype than the other takes."""
    given, taken = giver.gives.get(taker.rank, []), taker.expected_from(giver.rank)
    marks = {giver.rank: f"gives {sizes_text(given)}", taker.rank: f"takes {sizes_text(taken)}"}
    return _finding(
        f"other-{_name_of_difference(given, taken)}",
        f"{_nth(giver, position)}, {giver.kind}: rank {giver.world_rank} gives "
        f"{sizes_text(given)} to rank {taker.world_rank}, which takes {sizes_text(taken)}",
        (giver, taker),
        calls,
        marks={} if giver is taker else marks,
    )


def _fit(given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> bool:
    return len(given) == len(taken) and all(
        a.dtype == b.dtype and prod(a.shape) == prod(b.shape)
        for a, b in zip(given, taken, strict=True)
    )


def _name_of_difference(given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> str:
    if len(given) == len(taken) and [t.dtype for t in given] != [t.dtype for t in taken]:
        return "dtype"
    return "size"


def of_message(send: Call, receive: Call) -> Finding | None:
    """Return the difference of a send and its receive, or None."""
    given, taken = send.inputs, receive.outputs
    if _fit(given, taken):
        return None
    name = _name_of_difference(given, taken)
    return _finding(
        f"other-{name}",
        f"rank {send.world_rank} sends {sizes_text(given)}, "
        f"rank {receive.world_rank} receives {sizes_text(taken)}",
        (send, receive),
    )


def of_groups(calls: dict[int, Call], known: Group, call: Call) -> Finding:
    """Report a group whose ranks disagree on its members."""
    other = next(iter(calls.values()))
    return _finding(
        "other-group",
        f"group {known.name} has the ranks {list(known.ranks)} on rank {other.world_rank}, "
        f"{list(call.group.ranks)} on rank {call.world_rank}: all ranks have to make the same "
        "groups in the same order",
        (other, call),
    )


def left_over(call: Call, why: str, kind: str) -> Finding:
    """Report a message with only one end."""
    return _finding(kind, f"rank {call.world_rank}: {call}: {why}", (call,))


def not_joined(calls: dict[int, Call], missing: Sequence[int]) -> Finding:
    """Report a collective that some ranks began, and others never did."""
    made = list(calls.values())
    who = ", ".join(map(str, missing))
    return _finding(
        "not-joined",
        f"rank {who} returned without {made[0].kind} on {made[0].group}, which others began",
        made,
    )
