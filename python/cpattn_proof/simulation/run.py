# SPDX-License-Identifier: Apache-2.0
"""One run of a program in one order of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch.distributed as dist

from ..findings import Finding
from ..results.expect import Collector
from . import comparison, in_flight
from .calls import Call, site_of_caller
from .fabric import Fabric, Refuted
from .link import Link
from .process.torch_names import without_dispatch
from .scheduler import RankState, Scheduler, Stopped
from .store import SimulatedStore
from .stuck import Waiting, finding_of
from .work import SimulatedWork


class Run:
    """One run: ranks, their calls, and the faults found.

    Parameters
    ----------
    size : int
        Number of ranks.
    seed : int
        Seed of the order in which ranks run.
    link : Link
        Model of message times.
    buffered_sends : bool
        Whether a send ends without its receive.
    has_values : bool
        Whether tensors have values, which are moved and watched; else only sizes.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        link: Link,
        *,
        buffered_sends: bool = False,
        has_values: bool = True,
    ) -> None:
        self.size, self.seed = size, seed
        self.link = link
        self._has_values = has_values
        self.fabric = Fabric(size, link, buffered_sends=buffered_sends)
        self.findings: list[Finding] = []
        self._stores: dict[object, SimulatedStore] = {}
        self.num_calls = 0
        self.expected = Collector(lambda: self.rank, size)
        self.text_of_failure = ""  # text of the error `failure`
        self._scheduler = Scheduler(seed, self._on_stuck)
        self._watches = [in_flight.Watch() for _ in range(size)]
        self._waiting: dict[int, Waiting] = {}

    @property
    def rank(self) -> int:
        """Running rank."""
        return self._scheduler.current

    @property
    def rank_of_failure(self) -> int:
        """Rank that raised `failure`."""
        return self._scheduler.failed_rank

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the run, or None."""
        return self._scheduler.failure

    def execute(
        self,
        program: Callable[[int], None],
        states: Sequence[RankState],
        limit: float,
    ) -> None:
        """Run the program on all ranks; see `findings` and `failure` for the faults."""

        def body(rank: int) -> Callable[[], None]:
            def live() -> None:
                with self._watches[rank]:
                    self.link.resume(rank)
                    program(rank)
                    self.link.pause(rank)

            return live

        self._scheduler.run([body(rank) for rank in range(self.size)], states, limit)
        for watch in self._watches:
            self._note(*watch.findings)
        if not self._scheduler.stopping:
            self._note(*self.fabric.unmatched())

    def begin(self, call: Call) -> dist.Work:
        """Start a call of the running rank."""
        self._scheduler.check()
        watch = self._watches[call.world_rank]
        self.link.pause(call.world_rank)
        call.begin = self.link.now[call.world_rank]
        try:
            if self._has_values:
                with without_dispatch():
                    in_flight.note_writers(call, watch.calls)
                    in_flight.start(call)
                    call.digest = comparison.digest_of_given(call)
            self.fabric.post(call)
        except Refuted as refuted:
            self.refute(refuted.finding)
        watch.calls.append(call)
        self.num_calls += call.kind != "new_group"
        self._scheduler.offer()
        self.link.resume(call.world_rank)
        return SimulatedWork(call, self._wait, self._poll)

    def refute(self, finding: Finding) -> NoReturn:
        """Record a finding, and end the run."""
        self._note(finding)
        self._scheduler.stop()
        raise Stopped

    def fail(self, failure: BaseException) -> NoReturn:
        """End the run by an error."""
        self._scheduler.stop(failure)
        raise Stopped

    def store_of(self, key: object) -> SimulatedStore:
        """Return the store of a name; torch keeps no reference to stores written in Python."""
        return self._stores.setdefault(key, SimulatedStore(self))

    def is_rank(self) -> bool:
        """Tell whether the calling thread is the running rank."""
        return self._scheduler.is_turn()

    def block(self, ready: Callable[[], bool], what: str = "a key of the store") -> None:
        """Wait for an event other than a call."""
        self._scheduler.check()
        rank = self.rank
        self._waiting[rank] = Waiting(site_of_caller(), what)
        self._scheduler.block(ready)
        del self._waiting[rank]

    def give_way(self) -> None:
        """Let other ranks run, because repeated polling is a wait."""
        self._scheduler.give_way()

    def _wait(self, call: Call) -> None:
        if call.delivered:
            return
        self._scheduler.check()
        rank = call.world_rank
        self.link.pause(rank)
        self._waiting[rank] = Waiting(site_of_caller(), str(call), call)
        self._scheduler.block(lambda: call.complete)
        del self._waiting[rank]
        self._deliver(call)
        self.link.await_end(call)
        self.link.resume(rank)

    def _poll(self, call: Call) -> bool:
        if not call.delivered:
            self._scheduler.give_way()
        if call.complete and not call.delivered:
            self._deliver(call)
        return call.complete

    def _deliver(self, call: Call) -> None:
        if call.delivered:
            return
        if self._has_values:
            with without_dispatch():
                self._note(*in_flight.faults_of(call))
                if call.partners:  # a send into a buffer may not be received yet
                    in_flight.deliver(call)
        call.delivered = True
        self._watches[call.world_rank].calls.remove(call)
        call.let_go()

    def _note(self, *findings: Finding) -> None:
        self.findings += [finding for finding in findings if finding not in self.findings]

    def _on_stuck(self) -> None:
        over = [rank for rank in range(self.size) if self._scheduler.is_over(rank)]
        self._note(finding_of(self._waiting, over, self.fabric))
