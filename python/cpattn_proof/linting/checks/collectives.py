# SPDX-License-Identifier: Apache-2.0
"""SEQ: ranks of a group make the same calls, with sizes that fit, in an order without deadlock.

Sends and receives match by sender, receiver and tag, in order; they count as non-blocking, as in a
batch of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ...findings import Finding
from ..model import Absent, Plan
from ..pictures import Bars, ranges_of, side_by_side
from .check import Check, finding, many

_SENDS = ("send", "recv")
_ALIKE = ("kind", "dtype", "op", "root")
_MOST_SHOWN = 4


def _calls(plan: Plan) -> list[list[Mapping[str, Any]]]:
    if not any("collectives" in rank for rank in plan.ranks):
        raise Absent("no rank has collectives")
    return [list(rank.get("collectives", ())) for rank in plan.ranks]


def _text(call: Mapping[str, Any] | None) -> str:
    """Return a call as one line."""
    if call is None:
        return "(none)"
    numbers = call.get("sends") or call.get("size")
    shown = [call["kind"], *([] if numbers is None else [f"{numbers!s:.60}"])]
    shown += [str(call[name]) for name in ("op", "dtype") if name in call]
    shown += [f"{name} {call[name]}" for name in ("root", "peer", "tag") if name in call]
    return " ".join([*shown, *([f"({call['label']})"] if "label" in call else [])])


def in_order(plan: Plan) -> list[Finding]:
    """Advance ranks call by call, until all are done or some wait forever."""
    calls = _calls(plan)
    queues = [[c for c in of_rank if c["kind"] not in _SENDS] for of_rank in calls]
    at = [0] * len(queues)
    arrived: dict[frozenset[int], int] = {}  # ranks that wait in a group
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        if at[rank] == len(queues[rank]):
            continue
        members = plan.members(queues[rank][at[rank]])
        arrived[members] = arrived.get(members, 0) + 1
        if arrived[members] < len(members):
            continue
        del arrived[members]
        group = plan.group(queues[min(members)][at[min(members)]])
        if fault := _differences(group, _heads(group, at, queues), at, queues):
            return fault
        for member in group:
            at[member] += 1
            ready.append(member)
    stuck = [rank for rank, queue in enumerate(queues) if at[rank] < len(queue)]
    waiting = {plan.members(queues[rank][at[rank]]): rank for rank in reversed(stuck)}
    for members, rank in sorted(waiting.items(), key=lambda item: item[1]):
        group = plan.group(queues[rank][at[rank]])
        heads = _heads(group, at, queues)
        if all(head is None or plan.members(head) == members for head in heads):
            return _differences(group, heads, at, queues)  # also for ranks that have ended
    return _stuck(plan, stuck, at, queues) if stuck else []


def _heads(
    group: tuple[int, ...], at: list[int], queues: list[list[Mapping[str, Any]]]
) -> list[Mapping[str, Any] | None]:
    """Return the current call of each rank of a group; None if the rank has ended."""
    return [queues[r][at[r]] if at[r] < len(queues[r]) else None for r in group]


def _differences(
    group: tuple[int, ...],
    heads: list[Mapping[str, Any] | None],
    at: list[int],
    queues: list[list[Mapping[str, Any]]],
) -> list[Finding]:
    """Report the first difference between calls of a group that meet."""
    first = next(head for head in heads if head is not None)
    number = {rank: at[rank] for rank in group}
    for rank, head in zip(group, heads, strict=True):
        if head is None:
            other = group[heads.index(first)]
            what = f"rank {rank} makes no call, rank {other} waits in {_text(first)}"
            return _fault("missing", what, [other, rank], number, queues)
        different = [name for name in _ALIKE if head.get(name) != first.get(name)]
        if different:
            what = f"rank {group[0]} calls {_text(first)}, rank {rank} {_text(head)}"
            return _fault(different[0], what, [group[0], rank], number, queues)
    known = [head for head in heads if head is not None]
    return _sizes(group, known, number, queues)


def _sizes(
    group: tuple[int, ...],
    heads: list[Mapping[str, Any]],
    number: dict[int, int],
    queues: list[list[Mapping[str, Any]]],
) -> list[Finding]:
    if heads[0]["kind"] == "all_to_all" and any({"sends", "receives"} & {*head} for head in heads):
        return _exchanged(group, heads, number, queues)
    sizes = [head.get("size") for head in heads]
    for rank, size in zip(group, sizes, strict=True):
        if size != sizes[0]:
            what = (
                f"{heads[0]['kind']} of {sizes[0]} elements on rank {group[0]}, "
                f"of {size} on rank {rank}"
            )
            return _fault("size", what, [group[0], rank], number, queues)
    return []


def _exchanged(
    group: tuple[int, ...],
    heads: list[Mapping[str, Any]],
    number: dict[int, int],
    queues: list[list[Mapping[str, Any]]],
) -> list[Finding]:
    """Check that a rank sends in an all-to-all what its receivers expect."""
    sends: dict[tuple[int, int], int] = {}
    receives: dict[tuple[int, int], int] = {}
    for rank, head in zip(group, heads, strict=True):
        order = head.get("group", sorted(group))
        for name, sizes in (("sends", sends), ("receives", receives)):
            values = head.get(name)
            if values is not None and len(values) != len(order):
                parts = f"{many(len(values), 'part')} in a group of {many(len(order), 'rank')}"
                what = f"rank {rank} {name} {parts}"
                return _fault("size", what, [rank], number, queues)
            if values is None and "size" in head:  # equal parts
                values = [head["size"] // len(order)] * len(order)
            sizes.update(zip(((rank, other) for other in order), values or (), strict=False))
    for (rank, other), size in sends.items():
        expected = receives.get((other, rank), size)
        if size != expected:
            what = f"rank {rank} sends rank {other} {size} elements, which expects {expected}"
            return _fault("size", what, [rank, other], number, queues)
    return []


def _fault(
    name: str,
    what: str,
    ranks: list[int],
    number: dict[int, int],
    queues: list[list[Mapping[str, Any]]],
) -> list[Finding]:
    shown = sorted({*ranks, *list(number)[:_MOST_SHOWN]})[:_MOST_SHOWN]
    shown = shown if set(ranks) <= set(shown) else sorted(ranks)
    mark = number[ranks[0]]
    columns = [(f"rank {rank}", [_text(call) for call in queues[rank]]) for rank in shown]
    alike = len({number[rank] for rank in shown}) == 1
    calls = {str(rank): number[rank] for rank in ranks}
    return finding(
        "seq-" + name, what, f"call {mark}", ranks,
        side_by_side(columns, mark if alike else None), calls=str(calls), call=mark,
    )  # fmt: skip


def _stuck(
    plan: Plan, stuck: list[int], at: list[int], queues: list[list[Mapping[str, Any]]]
) -> list[Finding]:
    """Report ranks that wait for each other in different groups."""
    heads = {rank: queues[rank][at[rank]] for rank in stuck}
    lines = [
        f"rank {rank}  call {at[rank]}: {_text(head)} of ranks {list(plan.group(head))}"
        for rank, head in list(heads.items())[:_MOST_SHOWN]
    ]
    rank = stuck[0]
    others = [r for r in plan.group(heads[rank]) if r in heads and heads[r] != heads[rank]]
    other = next(
        (r for r in others if set(plan.group(heads[r])) != set(plan.group(heads[rank]))), rank
    )
    return finding(
        "seq-order", f"rank {rank} waits in {_text(heads[rank])} for rank {other}, which waits in "
        f"{_text(heads[other])} of another group", f"call {at[rank]}", stuck, "\n".join(lines),
        call=at[rank],
    )  # fmt: skip


def messages(plan: Plan) -> list[Finding]:
    """Check that every send has its receive, with the same size and dtype."""
    calls = _calls(plan)
    sent: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    received: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            if call["kind"] == "send":
                sent.setdefault((rank, call["peer"], call.get("tag", 0)), []).append(call)
            elif call["kind"] == "recv":
                received.setdefault((call["peer"], rank, call.get("tag", 0)), []).append(call)
    if not sent and not received:
        raise Absent("no rank sends or receives")
    for link in sorted({*sent, *received}):
        pairs = zip_longest(sent.get(link, []), received.get(link, []))
        for index, (out, back) in enumerate(pairs):
            source, target, tag = link
            ours, theirs = out or {}, back or {}
            if out and back and all(ours.get(n) == theirs.get(n) for n in ("size", "dtype")):
                continue
            what = f"rank {source}: {_text(out)}; rank {target}: {_text(back)}"
            return finding(
                "seq-message", what, f"message {index} from rank {source} to rank {target}",
                (source, target), message=index, tag=tag,
            )  # fmt: skip
    return []


def groups(plan: Plan) -> list[Finding]:
    """Check that exactly the required ranks make a call with a stated purpose."""
    named = [
        (rank, index, call)
        for rank, calls in enumerate(_calls(plan))
        for index, call in enumerate(calls)
        if "over" in call
    ]
    if not named:
        raise Absent("no call says which of groups it is for")
    right: set[tuple[frozenset[int], frozenset[int]]] = set()  # already checked
    for rank, index, call in named:
        sends = call["kind"] in _SENDS
        group = frozenset((rank, call["peer"])) if sends else plan.members(call)
        wanted = plan.meant[call["over"]].get(rank, frozenset())
        if (group, wanted) in right or group == wanted or (sends and group <= wanted):
            right.add((group, wanted))
            continue
        name = call["over"]
        bars = Bars(0, len(plan.ranks))
        bars.add(f"group {name}", ranges_of([*wanted]))
        bars.add("called by", ranges_of([*group]))
        (found,) = finding(
            "seq-group", f"rank {rank} calls {_text(call)} of ranks {_listed([*group])}; for "
            f"{name} it is {_listed([*wanted])}", f"call {index}", group ^ wanted,
            bars.picture(), call=index, over=name, group=sorted(group), expected=sorted(wanted),
        )  # fmt: skip
        return [replace(found, advice="Look which process group is passed to this call.")]
    return []


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks in ascending order, only the first if there are many."""
    shown = [
        f"{begin}-{end - 1}" if end - begin > 1 else f"{begin}" for begin, end in ranges_of(ranks)
    ]
    return ", ".join([*shown[:8], *(["..."] if len(shown) > 8 else [])]) or "none"


CHECKS = (
    Check("SEQ", "collectives", in_order),
    Check("SEQ", "messages", messages),
    Check("SEQ", "groups", groups),
)
