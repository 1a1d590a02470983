# SPDX-License-Identifier: Apache-2.0
"""Plans from two lists of pages to blocks: pages grouped into runs, then blocks of each buffer.

The peers are the best that NumPy offers, whole arrays at a time, and a restatement of the loops of
sglang 0.5.23 in our own words: groups of NumPy arrays, then a tuple for each buffer and group. The
peers take the pages in the given order; cpattn also sorts them, for the least number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import cpattn
from bench.harness.comparison import Bar, Comparison, Wrong, microseconds, times_as_fast

LAYERS, PAGES, PAGE_SIZE = 61, 900, 64
TOKEN_BYTES = {"k": 512 * 2, "v": 64 * 2}  # of MLA in bfloat16
OURS, NUMPY, LOOPS = "cpattn", "NumPy", "Python loops"
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def comparisons(quick: bool) -> Iterator[Comparison]:
    layers, pages = (3, 40) if quick else (LAYERS, PAGES)
    for name, order in ORDERS.items():
        yield of_pages(f"plan, {name} pages", layers, order(pages, 1), order(pages, 2))


def shuffled(num_pages: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(2 * num_pages)[:num_pages]


def half_contiguous(num_pages: int, seed: int) -> np.ndarray:
    """A run of half of the pages, and single pages."""
    half = num_pages // 2
    single = np.random.default_rng(seed).permutation(num_pages - half)
    return np.concatenate([np.arange(half), half + 1 + 2 * single])


def contiguous(num_pages: int, seed: int) -> np.ndarray:
    return np.arange(seed, seed + num_pages)


ORDERS = {"shuffled": shuffled, "half contiguous": half_contiguous, "contiguous": contiguous}


def of_pages(job: str, layers: int, src_pages: np.ndarray, dst_pages: np.ndarray) -> Comparison:
    src_pages, dst_pages = src_pages.astype(np.int32), dst_pages.astype(np.int32)
    num_pages = int(max(src_pages.max(), dst_pages.max())) + 1
    src, dst = (layout(layers, num_pages, base) for base in (1 << 46, 1 << 47))
    src_ptrs, dst_ptrs = pointers(src), pointers(dst)
    item_lens = np.array([entry.item_len for entry in src.entries], np.uint64)

    def in_lists() -> tuple[Any, ...]:
        sides = src_ptrs.tolist(), dst_ptrs.tolist()
        return in_loops(*sides, item_lens.tolist(), src_pages, dst_pages)

    implementations: dict[str, Callable[[], Any]] = {
        OURS: lambda: cpattn.transfer.plan_kv_transfer(src, dst, src_pages, dst_pages),
        NUMPY: lambda: in_numpy(src_ptrs, dst_ptrs, item_lens, src_pages, dst_pages),
        LOOPS: in_lists,
    }
    expected = in_lists()

    def check(name: str, result: Any) -> float:
        if name == OURS:
            result = (result.src_addrs, result.dst_addrs, result.lengths)
        if not np.array_equal(joined(result), wanted):
            raise Wrong("other bytes")
        return 0.0

    wanted, num_blocks = joined(expected), len(expected[0])
    return Comparison(
        "planning",
        {"job": job, "layers": layers, "pages": len(src_pages), "threads": 1},
        implementations,
        check,
        work=(num_blocks / 1e9, "Gblock"),
        items=(1, "plan"),
        bars=bars(job),
    )


def bars(job: str) -> tuple[Bar, ...]:
    faster = times_as_fast(OURS, NUMPY, 1, NUMPY)
    return (microseconds(OURS, 500), faster) if "shuffled" in job else (faster,)


def layout(layers: int, num_pages: int, base: int) -> cpattn.transfer.KVLayout:
    entries = []
    for kind, token_bytes in TOKEN_BYTES.items():
        for layer in range(layers):
            item_len = PAGE_SIZE * token_bytes
            entries.append(
                cpattn.transfer.KVEntry(layer, kind, False, base, num_pages * item_len, item_len)
            )
            base += num_pages * item_len
    return cpattn.transfer.KVLayout(entries, PAGE_SIZE)


def pointers(side: cpattn.transfer.KVLayout) -> np.ndarray:
    return np.array([entry.addr for entry in side.entries], np.uint64)


def joined(blocks: Sequence[Any]) -> np.ndarray:
    """Blocks in the order of the destination, adjacent ones joined, as columns."""
    src, dst, lengths = (np.ravel(np.asarray(part, np.uint64)) for part in blocks)
    order = np.argsort(dst)
    src, dst, lengths = src[order], dst[order], lengths[order]
    ends = (dst[:-1] + lengths[:-1] != dst[1:]) | (src[:-1] + lengths[:-1] != src[1:])
    begins = np.concatenate([[0], np.flatnonzero(ends) + 1])
    return np.array([src[begins], dst[begins], np.add.reduceat(lengths, begins)])


def in_numpy(
    src_ptrs: np.ndarray,
    dst_ptrs: np.ndarray,
    item_lens: np.ndarray,
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
) -> Arrays:
    """Whole arrays at a time, with a product by runs for each item length, not for each buffer."""
    jumps = (src_pages[1:] - src_pages[:-1] != 1) | (dst_pages[1:] - dst_pages[:-1] != 1)
    begins = np.concatenate([[0], np.flatnonzero(jumps) + 1])
    counts = np.diff(begins, append=len(src_pages)).astype(np.uint64)
    src_begins, dst_begins = (pages[begins].astype(np.uint64) for pages in (src_pages, dst_pages))
    src, dst, lengths = np.empty((3, len(item_lens), len(begins)), np.uint64)
    edges = np.flatnonzero(item_lens[1:] != item_lens[:-1]) + 1
    for first, end in zip([0, *edges], [*edges, len(item_lens)], strict=True):
        some, item_len = slice(first, end), item_lens[first]
        np.add(src_ptrs[some, None], src_begins * item_len, out=src[some])
        np.add(dst_ptrs[some, None], dst_begins * item_len, out=dst[some])
        lengths[some] = counts * item_len
    return src, dst, lengths


def in_loops(
    src_ptrs: list[int],
    dst_ptrs: list[int],
    item_lens: list[int],
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
) -> tuple[Any, ...]:
    """The steps of the engine, from groups to the three lists that it hands over."""
    jumps = np.where((np.diff(src_pages) != 1) | (np.diff(dst_pages) != 1))[0] + 1
    src_groups = [group.tolist() for group in np.split(src_pages, jumps)]
    dst_groups = [group.tolist() for group in np.split(dst_pages, jumps)]
    blocks = []
    for src_ptr, dst_ptr, item_len in zip(src_ptrs, dst_ptrs, item_lens, strict=True):
        for src_group, dst_group in zip(src_groups, dst_groups, strict=True):
            src_addr = src_ptr + int(src_group[0]) * item_len
            dst_addr = dst_ptr + int(dst_group[0]) * item_len
            blocks.append((src_addr, dst_addr, item_len * len(src_group)))
    return tuple(zip(*blocks, strict=True))
