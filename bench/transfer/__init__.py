# SPDX-License-Identifier: Apache-2.0
"""Parts of bench_transfer.py: one module for each part of moving a KV cache.

A module has ``comparisons(quick)``, which gives the `Comparison` objects of its part. An
implementation that is not installed raises `contender.Failed`, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from cpattn import _core

THREADS = _core.default_num_threads()  # before anything sets another number
COPIED = 64 << 20  # bytes of each thread: beyond any cache


def copy_peak(num_threads: int) -> Callable[[], float]:
    """Measures the bytes per second, read and written, of threads that copy memory."""
    pairs = [(np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)) for _ in range(num_threads)]
    return partial(_copy_rate, pairs)


def _copy_rate(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    def copy(pair: tuple[np.ndarray, np.ndarray]) -> None:
        np.copyto(pair[1], pair[0])

    seconds = []
    with ThreadPoolExecutor(len(pairs)) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(copy, pairs))
            seconds.append(time.perf_counter() - begin)
    return 2 * COPIED * len(pairs) / min(seconds)
