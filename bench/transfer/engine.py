# SPDX-License-Identifier: Apache-2.0
"""Pages to another process over Mooncake's engine, TCP on loopback: blocks of runs, or of pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

import cpattn
from bench.harness.comparison import Comparison, Wrong, times_as_fast
from bench.transfer.planning import half_contiguous
from bench.transfer.receiver import Receiver, receiver

BUFFERS, PAGE_SIZE, PAGE_BYTES = 16, 16, 4096  # 8 layers, one KV head of 128 dimensions
PAGES = 2 * 256  # of a buffer
BUFFER_BYTES = PAGES * PAGE_BYTES
SIZE = BUFFERS * BUFFER_BYTES
OURS, PLAIN = "cpattn", "a block for each page"


def comparisons(quick: bool) -> Iterator[Comparison]:
    num_pages = 16 if quick else PAGES // 2
    yield of_pages("send half contiguous pages", half_contiguous(num_pages, 1), {}, 1.5)
    for run in (1, 4) if quick else (1, 4, 16, 64, 256):
        at_least = 8 if run >= 64 else None
        yield of_pages("send runs of pages", in_runs(num_pages, run), {"run": run}, at_least)


def in_runs(num_pages: int, run: int) -> np.ndarray:
    """Runs of some pages, with a hole after each."""
    begins = np.arange(num_pages // run) * 2 * run
    return (begins[:, None] + np.arange(run)).ravel()


def of_pages(
    job: str, pages: np.ndarray, about: dict[str, Any], at_least: float | None
) -> Comparison:
    """Compare transfers of pages to the same ids: the receiver's pages become the sender's."""
    pages = pages.astype(np.int32)
    sent = np.zeros_like(source())
    in_pages = BUFFERS, PAGES, PAGE_BYTES
    sent.reshape(in_pages)[:, pages] = source().reshape(in_pages)[:, pages]

    @functools.cache
    def peer() -> Receiver:
        found = receiver(SIZE)
        found.memory[:] = 0  # what an earlier case sent
        return found

    def ours() -> int:
        to = peer()
        sides = layout(source().ctypes.data), layout(to.address)
        plan = cpattn.transfer.plan_kv_transfer(*sides, pages, pages)
        return plan.execute(to.engine, to.session)

    def plain() -> int:
        to = peer()
        begins = np.arange(BUFFERS)[:, None] * BUFFER_BYTES + pages * np.int64(PAGE_BYTES)
        for batch in np.split(
            begins.ravel(), range(to.engine.max_blocks, begins.size, to.engine.max_blocks)
        ):
            addresses = (source().ctypes.data + batch).tolist(), (to.address + batch).tolist()
            if code := to.engine.write(to.session, *addresses, [PAGE_BYTES] * len(batch)):
                return code
        return 0

    def check(name: str, code: int) -> float:
        memory = peer().memory
        same = np.array_equal(memory, sent)
        memory[:] = 0
        if code or not same:
            raise Wrong(f"code {int(code)}" if code else "other bytes arrived")
        return 0.0

    num_pages = BUFFERS * len(pages)
    return Comparison(
        "engine",
        {"job": job, "pages": len(pages), **about, "threads": 1},
        {OURS: ours, PLAIN: plain},
        check,
        work=(num_pages * PAGE_BYTES / 1e9, "GB"),
        items=(num_pages, "page"),
        bars=(times_as_fast(OURS, PLAIN, at_least, PLAIN),) if at_least else (),
    )


@functools.cache
def source() -> np.ndarray:
    """The sender's memory, without zeros."""
    return np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)


def layout(base: int) -> cpattn.transfer.KVLayout:
    buffers = [(kind, layer) for kind in "kv" for layer in range(BUFFERS // 2)]
    entries = [
        cpattn.transfer.KVEntry(
            layer, kind, False, base + i * BUFFER_BYTES, BUFFER_BYTES, PAGE_BYTES
        )
        for i, (kind, layer) in enumerate(buffers)
    ]
    return cpattn.transfer.KVLayout(entries, PAGE_SIZE)
