# SPDX-License-Identifier: Apache-2.0
"""Matching of ranks' calls, and check that matching calls agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from ..findings import Finding
from . import differences
from .calls import Call, Group
from .link import Link, sent_bytes
from .reductions import reduced

_Key = tuple[int, str]


@dataclass
class Round:
    """Matching calls of a group: the first of each rank, or the second, ..."""

    number: int
    calls: dict[int, Call] = field(default_factory=dict)

    def missing(self, group: Group) -> list[int]:
        """Return the world ranks that have not called yet."""
        return [world for rank, world in enumerate(group.ranks) if rank not in self.calls]


class Refuted(Exception):
    """Error for a call that breaks an invariant together with calls of other ranks."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


class Fabric:
    """All calls of a run.

    Collectives of a group match by their order on each rank, messages by group, ranks and tag. A
    call is complete once all calls that it needs have been made; a send needs its receive, unless
    `buffered_sends`.
    """

    def __init__(self, size: int, link: Link, *, buffered_sends: bool) -> None:
        self.history: list[list[Call]] = [[] for _ in range(size)]
        self.link = link
        self._buffered_sends = buffered_sends
        self._rounds: dict[_Key, list[Round]] = defaultdict(list)
        self._positions: dict[tuple[_Key, int], int] = defaultdict(int)
        self._members: dict[_Key, Group] = {}
        self._sends: list[Call] = []
        self._receives: list[Call] = []

    def post(self, call: Call) -> None:
        """Add a call; `Refuted` if it contradicts calls of other ranks."""
        calls = self.history[call.world_rank]
        call.number, call.sent_bytes = len(calls), sent_bytes(call)
        calls.append(call)
        if call.is_message:
            self._post_message(call)
        else:
            self._post_collective(call)

    def round_of(self, call: Call) -> Round:
        """Return the round of a collective call."""
        return next(one for one in self._rounds[_key_of(call.group)] if call in one.calls.values())

    def _post_collective(self, call: Call) -> None:
        key = _key_of(call.group)
        known = self._members.setdefault(key, call.group)
        if known != call.group:
            raise Refuted(differences.of_groups(self._rounds[key][0].calls, known, call))
        position = self._positions[key, call.rank]
        self._positions[key, call.rank] += 1
        rounds = self._rounds[key]
        if position == len(rounds):
            rounds.append(Round(position))
        one = rounds[position]
        one.calls[call.rank] = call
        others = list(one.calls.values())
        for other in others[:1] if call.is_uniform else others:
            if finding := differences.between(other, call, position, one.calls.values()):
                raise Refuted(finding)
        if len(one.calls) == len(call.group.ranks):
            self._complete(one.calls)

    def _post_message(self, call: Call) -> None:
        mine, others = (
            (self._sends, self._receives) if call.gives else (self._receives, self._sends)
        )
        partner = next((other for other in others if _fit(call, other)), None)
        if partner is None:
            mine.append(call)
            if call.gives and self._buffered_sends:
                call.complete = True
            return
        others.remove(partner)
        send, receive = (call, partner) if call.gives else (partner, call)
        if finding := differences.of_message(send, receive):
            raise Refuted(finding)
        self.link.carry([send, receive])
        send.partners, receive.partners = {receive.rank: receive}, {send.rank: send}
        receive.source = send.rank
        send.complete = receive.complete = True

    def _complete(self, calls: dict[int, Call]) -> None:
        self.link.carry(list(calls.values()))
        sums: dict[tuple[int, ...], torch.Tensor] = {}
        for call in calls.values():
            call.partners, call.sums = calls, sums
            call.complete = True

    def unmatched(self) -> Iterator[Finding]:
        """Report unmatched calls when all ranks have returned."""
        for send in self._sends:
            yield differences.left_over(send, "nobody receives it", "send-not-received")
        for receive in self._receives:
            yield differences.left_over(receive, "nobody sends it", "receive-not-sent")
        for key, rounds in self._rounds.items():
            for one in rounds:
                if missing := one.missing(self._members[key]):
                    yield differences.not_joined(one.calls, missing)

    def waits_for(self, call: Call) -> list[int]:
        """Return the world ranks that a call waits for; all others for a receive from any rank."""
        if not call.is_message:
            return self.round_of(call).missing(call.group)
        if call.peer == -1:
            return [world for world in call.group.ranks if world != call.world_rank]
        assert call.peer is not None
        return [call.group.ranks[call.peer]]


def _key_of(group: Group) -> _Key:
    """Return the key of a group's calls: groups of one rank may share a name."""
    return group.generation, group.name if len(group.ranks) > 1 else str(group)


def _fit(call: Call, other: Call) -> bool:
    """Tell whether a send and a receive match."""
    return (
        _key_of(call.group) == _key_of(other.group)
        and call.tag == other.tag
        and call.peer in (other.rank, -1)
        and other.peer in (call.rank, -1)
    )


def results_of(call: Call) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each output with its expected contents, as given by the other ranks."""
    for source, blocks in call.takes.items():
        given = _given_by(call, source)
        yield from zip(blocks, given, strict=True)
    if call.reduces:
        columns = zip(*(_given_by(call, rank) for rank in sorted(call.partners)), strict=True)
        for output, column in zip(call.reduces, columns, strict=True):
            key = tuple(map(id, column))  # all ranks of an all-reduce have the same
            if key not in call.sums:
                call.sums[key] = reduced(call.op, column)
            yield output, call.sums[key]


def _given_by(call: Call, source: int) -> list[torch.Tensor]:
    return call.partners[call.source if source == -1 else source].given[call.rank]
