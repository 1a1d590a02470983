# SPDX-License-Identifier: Apache-2.0
"""Short calls of several forms of one function, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Form = Callable[[], Any]
CALLS = 100  # in a sample


def in_turns(forms: Mapping[str, Form], rounds: int) -> dict[str, float]:
    """Microseconds of a call, the median of samples that take turns."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                form()
            samples[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
    return {name: median(times) for name, times in samples.items()}
