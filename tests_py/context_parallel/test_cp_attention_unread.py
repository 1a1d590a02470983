# SPDX-License-Identifier: Apache-2.0
"""Keys that windows and masks hide from a rank are not read: their pages may be out of reach."""

import ctypes
import mmap

import numpy as np
import pytest

import cpattn
from support.cases import dense

PAGE, HEADS, DIM = 1024, 2, 32  # a page of the cache is a whole number of pages of memory
EXTEND, PREFIX = 2000, 6000
LENGTH = EXTEND + PREFIX
NUM_PAGES = -(-LENGTH // PAGE)
STRATEGIES = ("zigzag", "interleave", "contiguous")


class Cache:
    """Pages of a cache, each of which can be put out of reach: reading it ends the process."""

    def __init__(self):
        self.page_bytes = PAGE * HEADS * DIM * 4
        assert self.page_bytes % mmap.PAGESIZE == 0
        self.memory = mmap.mmap(-1, NUM_PAGES * self.page_bytes)
        shape = (NUM_PAGES, PAGE, HEADS, DIM)
        self.array = np.frombuffer(self.memory, np.float32).reshape(shape)
        self.array[:] = np.random.default_rng(1).standard_normal(shape, np.float32)

    def protect(self, pages, protection):
        libc = ctypes.CDLL(None, use_errno=True)
        for page in pages:
            address = self.array.ctypes.data + int(page) * self.page_bytes
            result = libc.mprotect(
                ctypes.c_void_p(address), ctypes.c_size_t(self.page_bytes), protection
            )
            assert result == 0


def block_mask(shown):
    """Every token sees the pages of `shown`, and itself."""
    mask = np.zeros((EXTEND, LENGTH), bool)
    for page in shown:
        mask[:, page * PAGE : (page + 1) * PAGE] = True
    mask[np.arange(EXTEND), PREFIX + np.arange(EXTEND)] = True
    return mask


def visible(options):
    position = PREFIX + np.arange(EXTEND)[:, None]
    key = np.arange(LENGTH)
    seen = key <= position
    if "window" in options:
        seen &= key >= position - options["window"]
    if "custom_mask" in options:
        seen &= options["custom_mask"].reshape(EXTEND, LENGTH)
    return seen


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"window": 2100}, {"custom_mask": dense([block_mask([1, 4])])}],
    ids=["causal", "short window", "long window", "mask"],
)
def test_a_rank_reads_the_pages_that_its_rows_see(options, strategy):
    caches = [Cache(), Cache()]
    q = np.random.default_rng(0).standard_normal((EXTEND, HEADS * DIM), np.float32)
    seen = visible(options)
    hidden_somewhere = 0
    for cp_rank in range(4):
        rank = cpattn.build_cp_metadata(
            [EXTEND], [LENGTH], cp_rank=cp_rank, cp_size=4, strategy=strategy
        )

        def run(rank=rank):
            return cpattn.do_cp_attn_fia(
                rank.shard(q), caches[0].array, caches[1].array, rank,
                block_tables=[list(range(NUM_PAGES))], page_size=PAGE, num_heads=HEADS,
                num_kv_heads=HEADS, **options,
            )  # fmt: skip

        expected = run()
        pages = np.flatnonzero(seen[rank.local_q_indices].any(0)) // PAGE
        hidden = sorted(set(range(NUM_PAGES)) - set(pages.tolist()))
        hidden_somewhere += len(hidden)
        for cache in caches:
            cache.protect(hidden, 0)
        result = run()
        for cache in caches:
            cache.protect(hidden, mmap.PROT_READ | mmap.PROT_WRITE)
        assert np.array_equal(result, expected)
    assert hidden_somewhere or not options
