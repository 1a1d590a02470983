# SPDX-License-Identifier: Apache-2.0
"""Phases of a pass, and the time of each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Phases that are part of attention with sharded pools, where one call does everything.
_OVER_ONE_POOL = ("indexer", "top-k")


def over_pools(phases: tuple[str, ...], *, is_sharded: bool) -> tuple[str, ...]:
    """Return the phases measured separately, with sharded or replicated pools."""
    return tuple(phase for phase in phases if not (is_sharded and phase in _OVER_ONE_POOL))


def pass_phases(of_model: tuple[str, ...], pp_size: int) -> tuple[str, ...]:
    """Return the phases of a pass: those of the model, and the wait for other stages."""
    return of_model if pp_size == 1 else (*of_model[:-1], "stage", of_model[-1])


class PhaseClock:
    """Sums the seconds of named phases, which do not nest: ``with clock("gather"): ...``

    `begun` is called with the name of every phase at its begin, outside of its time.
    """

    def __init__(self, begun: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._begun = begun
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._begun(phase)
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def stop(self, phases: tuple[str, ...]) -> dict[str, float]:
        """Return the seconds of each of `phases`; the last gets the time outside of all phases."""
        total = time.perf_counter() - self._start
        self.seconds[phases[-1]] = total - sum(self.seconds.values())
        return {phase: self.seconds[phase] for phase in phases}
