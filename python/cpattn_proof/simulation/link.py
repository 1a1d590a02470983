# SPDX-License-Identifier: Apache-2.0
"""Model of the links between ranks, which determines when calls begin and end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2

import torch

from .calls import Call

# Steps of a ring, and the fraction of its bytes that a rank sends, by the number of ranks.
_ROUNDS_OF_A_RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}


@dataclass
class Event:
    """Period of the timeline."""

    rank: int
    name: str
    begin: float  # seconds
    end: float
    kind: str  # "compute", "wait" or "transfer"
    num_bytes: int = 0
    place: str = ""


@dataclass
class Link:
    """Model with one link per rank, on which its transfers are sequential.

    A rank's time advances by the CPU time of its thread; messages take `latency` seconds per step
    and `bytes_per_second`. Collectives are modelled as rings.
    """

    size: int
    latency: float
    bytes_per_second: float
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = [0.0] * self.size
        self._free = [0.0] * self.size
        self._cpu = [0.0] * self.size

    def resume(self, rank: int) -> None:
        """Start the CPU time of a rank."""
        self._cpu[rank] = time.thread_time()

    def pause(self, rank: int) -> None:
        """Add the CPU time of the rank since `resume`."""
        spent = time.thread_time() - self._cpu[rank]
        begin = self.now[rank]
        self.now[rank] += spent
        if spent > 0:
            self.events.append(Event(rank, "compute", begin, self.now[rank], "compute"))
        self._cpu[rank] = time.thread_time()

    def carry(self, calls: Sequence[Call]) -> None:
        """Determine when matching calls begin and end."""
        ranks = [call.world_rank for call in calls]
        begin = max([call.begin for call in calls] + [self._free[rank] for rank in ranks])
        steps = _steps(calls)
        num_bytes = max(call.sent_bytes for call in calls)
        seconds = steps * self.latency + num_bytes / self.bytes_per_second
        for call in calls:
            call.end = begin + seconds
            self._free[call.world_rank] = call.end
            self.events.append(
                Event(
                    call.world_rank,
                    call.kind,
                    begin,
                    call.end,
                    "transfer",
                    call.sent_bytes,
                    str(call.site),
                )
            )

    def await_end(self, call: Call) -> None:
        """Advance the rank's time to the end of a call."""
        begin = self.now[call.world_rank]
        if call.end > begin:
            self.now[call.world_rank] = call.end
            self.events.append(
                Event(call.world_rank, f"wait for {call.kind}", begin, call.end, "wait")
            )


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sent_bytes(call: Call) -> int:
    """Return the bytes that the rank sends in a call; collectives are rings."""
    others = len(call.group.ranks) - 1
    if call.kind.startswith("all_reduce"):
        return 2 * others * _nbytes(call.inputs) // (others + 1)
    if call.kind.startswith("all_gather"):
        return others * _nbytes(call.inputs)
    if call.kind.startswith("broadcast"):
        return _nbytes(call.inputs)
    return sum(_nbytes(blocks) for rank, blocks in call.gives.items() if rank != call.rank)


def _steps(calls: Sequence[Call]) -> int:
    """Return the number of sequential messages."""
    call = calls[0]
    others = len(call.group.ranks) - 1
    if call.is_message:
        return 1
    for kind, rounds in _ROUNDS_OF_A_RING.items():
        if call.kind.startswith(kind):
            return rounds * others
    return ceil(log2(others + 1))
