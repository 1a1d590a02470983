# SPDX-License-Identifier: Apache-2.0
"""Steps of ranks in a recorded run, in order: plans, messages, and computation between."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np

from ..captures import Capture, RecordedCall
from ..findings import NotUsable
from .calls import Site

_POST = "RowExchange.post"
_MOST_RANKS = 64
#: Calls whose fields must be equal on all ranks.
_BATCH = ("extend_lens", "seq_lens", "page_size", "cp_size", "placement", "block_tables", "slots")
_ALIKE = {
    "ContextParallel.plan": (*_BATCH, "strategy"),
    "ContextParallel.plan_decode": _BATCH,
}


@dataclass(frozen=True)
class Planned:
    """Plan of a batch, which all ranks must make alike; it sends nothing."""

    KINDS: ClassVar = tuple(_ALIKE)

    kind: str
    terms: dict[str, object]
    site: Site
    call: RecordedCall


@dataclass(frozen=True)
class Exchange:
    """Bytes to and from ranks, which later steps wait for."""

    name: str
    sends: Mapping[int, int]
    receives: Mapping[int, int]
    site: Site


@dataclass(frozen=True)
class Span:
    """Computation: a call without communication, including all calls within it."""

    name: str
    seconds: float
    site: Site


Step = Planned | Exchange | Span


def recorded_steps(capture: Capture) -> list[list[Step]]:
    """Return the steps of each rank by number; NotUsable if a rank is missing or occurs twice."""
    by_rank: dict[int, list[Step]] = {}
    sizes = set()
    for rank in capture.ranks:
        calls = [call for call in capture.calls if call.rank == rank]
        numbers = {call.fields["cp_rank"] for call in calls if call.name in (*_ALIKE, _POST)
                   and call.fields.get("cp_rank") is not None}  # fmt: skip
        sizes |= {call.fields["cp_size"] for call in calls if call.name in _ALIKE}
        if not numbers:
            continue
        if len(numbers) > 1 or numbers & by_rank.keys():
            raise NotUsable(
                "simulate_capture: captures must be of one group, each of another rank; that of "
                f"process {rank} is of rank {', '.join(map(str, sorted(numbers)))}"
            )
        by_rank[numbers.pop()] = _steps_of(calls)
    peers = {
        peer
        for steps in by_rank.values()
        for step in steps
        if isinstance(step, Exchange)
        for peer in (*step.sends, *step.receives)
    }
    size = max([*by_rank, *peers, max(sizes, default=0) - 1], default=-1) + 1
    if size > _MOST_RANKS:
        raise NotUsable(
            f"simulate_capture: at most {_MOST_RANKS} ranks can be simulated, got {size}"
        )
    if missing := sorted(set(range(size)) - set(by_rank)):
        raise NotUsable(
            f"simulate_capture: captures must be of all {size} ranks, there is none of rank "
            f"{', '.join(map(str, missing))}"
        )
    return [by_rank[rank] for rank in range(size)]


def check_usable(steps: Sequence[Sequence[Step]]) -> None:
    """Raise NotUsable if the steps have nothing to compare between ranks."""
    if not any(isinstance(step, (Planned, Exchange)) for of_rank in steps for step in of_rank):
        raise NotUsable(
            "simulate_capture: no rank planned or sent anything by a ContextParallel; "
            "cpattn plan --capture predicts batches alone"
        )


def _steps_of(calls: Sequence[RecordedCall]) -> list[Step]:
    calls = sorted(calls, key=lambda call: (call.at, -call.seconds))
    posts = [call.at for call in calls if call.name == _POST]
    steps: list[Step] = []
    computed = float("-inf")  # end of the computation so far
    for call in calls:
        site = Site(call.file, call.line, call.name.rpartition(".")[2])
        end = call.at + call.seconds
        if call.name == _POST:
            steps.append(_exchange(call, site))
            continue
        if call.name in _ALIKE:
            terms = {name: _told(call.fields[name]) for name in _ALIKE[call.name]}
            steps.append(Planned(call.name, terms, site, call))
        if call.at >= computed and bisect_left(posts, call.at) == bisect_right(posts, end):
            steps.append(Span(call.name, call.seconds, site))
            computed = end
    return steps


def _exchange(call: RecordedCall, site: Site) -> Exchange:
    sends, receives = (
        {int(peer): size for peer, size in call.fields[way].items()}
        for way in ("sends", "receives")
    )
    name = call.fields["exchange"]
    return Exchange(name, sends, receives, site._replace(function=name))


def _told(value: Any) -> object:
    """Show a field in a finding: a short list, or a digest."""
    if not isinstance(value, np.ndarray):
        return value
    if value.size <= 16:
        return value.tolist()
    return f"{list(value.shape)} of digest {blake2b(value.tobytes(), digest_size=4).hexdigest()}"
