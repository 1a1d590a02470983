# SPDX-License-Identifier: Apache-2.0
"""Where the time of a pass goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Adds up the seconds of named phases, which do not nest: ``with clock("gather"): ...``"""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def stop(self, phases: tuple[str, ...]) -> dict[str, float]:
        """The seconds of each of `phases`; the last gets all the time that none was running."""
        total = time.perf_counter() - self._start
        self.seconds[phases[-1]] = total - sum(self.seconds.values())
        return {phase: self.seconds[phase] for phase in phases}
