# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads; one runs at a time, in an order that a seed decides."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from ..findings import NotUsable

_AFTER_THE_END = 2.0  # seconds for a rank that is asked to end


class Stopped(BaseException):
    """Error that ends a rank when the simulation is over; `except Exception` misses it."""


class RankState(Protocol):
    """Private state of a rank in the process that all ranks share."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


class _RankThread(threading.Thread):
    """Thread that runs one simulated rank."""


@dataclass
class _Rank:
    body: Callable[[], None]
    state: RankState
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Callable[[], bool] | None = None  # condition that it waits for; None: it can run
    thread: threading.Thread | None = None
    over: bool = False


class Scheduler:
    """Runs ranks one at a time.

    A rank runs until it must wait. With seed 0, the next rank in rank order then runs; with other
    seeds, any rank that can run, drawn at every call.

    Parameters
    ----------
    seed : int
        Seed of the order; equal seeds give equal orders.
    on_stuck : callable
        Called once no rank can go on; it must lead to `stop`.
    """

    def __init__(self, seed: int, on_stuck: Callable[[], None]) -> None:
        self.current = -1
        self.failure: BaseException | None = None
        self.stopping = False
        self.failed_rank = -1
        self._random = random.Random(seed) if seed else None
        self._on_stuck = on_stuck
        self._ranks: list[_Rank] = []
        self._done = threading.Event()
        self._abandoned = False
        self._leaving = threading.Lock()

    def run(
        self, bodies: Sequence[Callable[[], None]], states: Sequence[RankState], limit: float
    ) -> None:
        """Run all ranks to their end, or until a fault, which `failure` holds."""
        self._ranks = [_Rank(*pair) for pair in zip(bodies, states, strict=True)]
        for number, rank in enumerate(self._ranks):
            rank.thread = _RankThread(
                target=self._live, args=(number,), name=f"rank {number}", daemon=True
            )
            rank.thread.start()
        self._pass_on()
        try:
            if not self._done.wait(limit):
                self._end_late(limit)
        except BaseException:
            self._interrupt()
            self._abandon()
            raise
        for rank in self._ranks:
            assert rank.thread is not None
            rank.thread.join(_AFTER_THE_END)
        self._abandon()

    def block(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`, while other ranks run."""
        self.check()
        if self._random is None and ready():
            return
        rank = self._ranks[self.current]
        rank.ready = ready
        self._hand_over(rank)
        rank.ready = None

    def offer(self) -> None:
        """Let another rank go first, if the seed selects it."""
        self.check()
        if self._random is not None:
            self._hand_over(self._ranks[self.current])

    def give_way(self) -> None:
        """Let another rank go on, for any seed."""
        self.check()
        self._hand_over(self._ranks[self.current])

    def check(self) -> None:
        """Check that the caller is the running rank and that the simulation goes on."""
        if self._abandoned:  # the rank keeps catching every exception
            threading.Event().wait()
        if not self.is_turn():
            self.stop(
                NotUsable(
                    f"simulate: rank {self.current} calls torch.distributed from a thread of its "
                    f"own, {threading.current_thread().name}; ranks have to do that from one"
                )
            )
            raise Stopped
        if self.stopping:
            raise Stopped

    def is_turn(self) -> bool:
        """Tell whether the calling thread is the running rank."""
        mine = self._ranks[self.current].thread if self._ranks else None
        return threading.current_thread() is mine

    def stop(self, failure: BaseException | None = None) -> None:
        """End all ranks, each at its next call."""
        self.failure = self.failure or failure
        self.stopping = True

    def is_over(self, number: int) -> bool:
        """Tell whether a rank has returned."""
        return self._ranks[number].over

    def _live(self, number: int) -> None:
        rank = self._ranks[number]
        rank.gate.acquire()
        try:
            self._enter(rank)
            rank.body()
        except Stopped:
            pass
        except BaseException as error:
            if not self.stopping:
                self.failed_rank = number
                self.stop(error)
        finally:
            rank.over = True
            with self._leaving:
                if not self._abandoned:
                    rank.state.leave()
            self._pass_on()

    def _hand_over(self, rank: _Rank) -> None:
        rank.state.leave()
        self._pass_on()
        rank.gate.acquire()
        self._enter(rank)

    def _enter(self, rank: _Rank) -> None:
        if not self._abandoned:
            rank.state.enter()
        if self.stopping:
            raise Stopped

    def _pass_on(self) -> None:
        """Wake the next rank, which may be the caller."""
        following = self._following()
        if following is None and not all(rank.over for rank in self._ranks):
            self._on_stuck()
            self.stopping = True
            following = self._following()
        if following is None:
            self._done.set()
        else:
            self.current = following
            self._ranks[following].gate.release()

    def _following(self) -> int | None:
        size = len(self._ranks)
        order = [(self.current + step) % size for step in range(1, size + 1)]
        able = [number for number in order if self._can_run(self._ranks[number])]
        if not able:
            return None
        return able[0] if self._random is None else self._random.choice(able)

    def _can_run(self, rank: _Rank) -> bool:
        return not rank.over and (self.stopping or rank.ready is None or rank.ready())

    def _end_late(self, limit: float) -> None:
        thread = self._ranks[self.current].thread
        assert thread is not None
        frame = sys._current_frames().get(thread.ident or 0)
        self.stop(
            NotUsable(
                f"simulate: not over after {limit:g} s (--time-limit); rank {self.current} runs "
                f"{_place_of(frame)}"
            )
        )
        self._interrupt()

    def _interrupt(self) -> None:
        """End the running rank, and with it all others, as far as Python can."""
        self.stopping = True
        ended = ctypes.py_object(Stopped)
        for _ in range(len(self._ranks)):
            thread = self._ranks[self.current].thread
            if self._done.is_set() or thread is None:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ended)
            if self._done.wait(_AFTER_THE_END):
                return

    def _abandon(self) -> None:
        """Detach the private state of a rank that cannot be ended, as in a call of C."""
        with self._leaving:
            if not self._done.is_set():
                self._abandoned = True
                self._ranks[self.current].state.leave()


def are_left() -> bool:
    """Tell whether some ranks could not be ended."""
    return any(isinstance(thread, _RankThread) for thread in threading.enumerate())


def _place_of(frame: FrameType | None) -> str:
    if frame is None:
        return "no Python code"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
