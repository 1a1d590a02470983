# SPDX-License-Identifier: Apache-2.0
"""Keys that windows and masks hide from a rank are not read: their pages may be unreadable."""

import ctypes
import mmap

import numpy as np
import pytest

import cpattn

PAGE, HEADS, DIM = 1024, 2, 32  # a page of the cache is a whole number of pages of memory
EXTEND, PREFIX = 2000, 6000
LENGTH = EXTEND + PREFIX
NUM_PAGES = -(-LENGTH // PAGE)
STRATEGIES = ("zigzag", "interleave", "contiguous")


class Cache:
    """Pages of a cache; each can be made unreadable, so that a read ends the process."""

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


KEY, OWN = np.arange(LENGTH), PREFIX + np.arange(EXTEND)[:, None]
CAUSAL, MASK = KEY <= OWN, np.isin(KEY // PAGE, [1, 4]) | (KEY == OWN)
OPTIONS = {
    "causal": ({}, CAUSAL),
    "short window": ({"window": 50}, CAUSAL & (KEY >= OWN - 50)),
    "long window": ({"window": 2100}, CAUSAL & (KEY >= OWN - 2100)),
    "mask": ({"custom_mask": MASK.ravel()}, CAUSAL & MASK),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("options", "seen"), OPTIONS.values(), ids=OPTIONS)
def test_a_rank_reads_the_pages_that_its_rows_see(options, seen, strategy):
    caches = [Cache(), Cache()]
    q = np.random.default_rng(0).standard_normal((EXTEND, HEADS * DIM), np.float32)
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
