# SPDX-License-Identifier: Apache-2.0
"""Pages to another pool of the same process, against the speed of copying memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import cpattn
from bench.harness.comparison import Comparison, Wrong, percent_of_peak, times_as_fast
from bench.transfer import THREADS, copy_peak
from bench.transfer.planning import half_contiguous

BUFFERS, PAGE_BYTES = 4, 64 << 10
OURS, NUMPY = "cpattn", "NumPy"


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_pages = 16 if quick else 900
    for num_threads in [THREADS] if quick else sorted({1, THREADS}):
        yield of_pages(num_pages, num_threads)


def of_pages(num_pages: int, num_threads: int) -> Comparison:
    """The same half contiguous page ids on both sides."""
    pages = half_contiguous(num_pages, 1)
    shape = BUFFERS, int(pages.max()) + 1, PAGE_BYTES
    source = np.random.default_rng(1).integers(1, 256, shape, np.uint8)
    engine, target = cpattn.transfer.LocalEngine(), np.zeros_like(source)
    cpattn.transfer.register(engine, source, target)
    plan = cpattn.transfer.plan_kv_transfer(layout(source), layout(target), pages, pages)

    def ours() -> int:
        return plan.execute(engine, engine.session_id)

    def in_numpy() -> int:
        target[:, pages] = source[:, pages]
        return 0

    def check(name: str, code: int) -> float:
        same = (target[:, pages] == source[:, pages]).all()
        if code or not same or np.count_nonzero(target) != BUFFERS * num_pages * PAGE_BYTES:
            raise Wrong(f"code {int(code)}" if code else "other bytes were copied")
        target[:] = 0
        return 0.0

    return Comparison(
        "local",
        {"job": "copy half contiguous pages", "pages": num_pages, "threads": num_threads},
        {OURS: ours, NUMPY: in_numpy},
        check,
        work=(2 * plan.total_bytes / 1e9, "GB"),
        items=(BUFFERS * num_pages, "page"),
        bars=(percent_of_peak(OURS, 80), times_as_fast(OURS, NUMPY, 1, NUMPY)),
        peak=copy_peak(num_threads),
    )


def layout(array: np.ndarray) -> cpattn.transfer.KVLayout:
    entries = [
        cpattn.transfer.KVEntry(
            i // 2, "kv"[i % 2], False, buffer.ctypes.data, buffer.nbytes, PAGE_BYTES
        )
        for i, buffer in enumerate(array)
    ]
    return cpattn.transfer.KVLayout(entries, 16)
