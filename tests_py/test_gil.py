# SPDX-License-Identifier: Apache-2.0
"""Functions that compute leave the GIL to other threads of Python, and take it back."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import cpattn
from cpattn import _core

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


CACHE = normal(64, 16, 2, 64)
TABLE = np.arange(64)[None]
ROWS = {"q_lens": [64], "kv_lens": [1024], "block_tables": TABLE}
PLAN = cpattn.build_cp_metadata([64], [1024], cp_rank=0, cp_size=1)
QUERIES, KEYS = normal(64, 4, 64), normal(1024, 64)
RANGES = {"ks": [0] * 64, "ke": [1024] * 64}
WEIGHTS = normal(64, 4)
LATENTS, INDICES = normal(1024, 1, 64), RNG.integers(0, 1024, (64, 1, 256))
SCORES = normal(200, 20000)
PAGED = cpattn.plan_attention(
    **ROWS, page_size=16, num_pages=64, num_heads=4, num_kv_heads=2, head_dim=64
)
PARTS = [normal(4000, 4, 64), normal(4000, 4)]
OTHER_PARTS = [normal(4000, 4, 64), normal(4000, 4)]
MANY_LENS = RNG.integers(1, 9000, 20000).tolist()

CALLS: dict[str, Callable[[], object]] = {
    "paged_attention": lambda: cpattn.paged_attention(QUERIES, CACHE, CACHE, **ROWS),
    "run_attention": lambda: cpattn.run_attention(PAGED, QUERIES, CACHE, CACHE),
    "do_cp_attn_fia": lambda: cpattn.do_cp_attn_fia(
        QUERIES.reshape(64, -1), CACHE, CACHE, PLAN, block_tables=TABLE, page_size=16,
        num_heads=4, num_kv_heads=2, scale=None,
    ),
    "npu_fused_infer_attention_score": lambda: cpattn.npu_fused_infer_attention_score(
        QUERIES[None], CACHE.reshape(1, 1024, 2, 64), CACHE.reshape(1, 1024, 2, 64),
        num_heads=4, num_key_value_heads=2, input_layout="BSND",
    ),
    "flash_mla_sparse_fwd": lambda: cpattn.flash_mla_sparse_fwd(
        QUERIES, LATENTS, INDICES, 0.1, d_v=64
    ),
    "indexer_logits": lambda: cpattn.indexer_logits(QUERIES, KEYS, WEIGHTS, **RANGES),
    "indexer_topk": lambda: cpattn.indexer_topk(QUERIES, KEYS, WEIGHTS, **RANGES, topk=64),
    "cp_indexer_topk": lambda: cpattn.cp_indexer_topk(
        QUERIES, CACHE[:, :, 0], WEIGHTS, PLAN, block_tables=TABLE, page_size=16, topk=64
    ),
    "fast_topk": lambda: cpattn.fast_topk(SCORES, [20000] * 200, 2048),
    "merge_state": lambda: cpattn.merge_state(*PARTS, *OTHER_PARTS),
    "build_cp_metadata": lambda: cpattn.build_cp_metadata(MANY_LENS, cp_rank=0, cp_size=8),
    "build_cp_metadata_all_ranks": lambda: cpattn.build_cp_metadata_all_ranks(
        MANY_LENS, cp_size=8
    ),
    "reference.paged_attention": lambda: cpattn.reference.paged_attention(
        QUERIES, CACHE, CACHE, **ROWS
    ),
}  # fmt: skip


class Watcher:
    """A thread that counts how often it runs while the main thread is within a call."""

    def __init__(self) -> None:
        self.within = self.ended = False
        self.count = 0
        self.thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self.ended:
            self.count += self.within
            time.sleep(1e-5)

    def counts_within(self, call: Callable[[], object], wanted: int, calls: int) -> int:
        """Over at most so many calls."""
        self.count = 0
        for _ in range(calls):
            self.within = True
            call()
            self.within = False
            if self.count >= wanted:
                break
        return self.count


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    """Python itself lets no other thread in: the switch interval is longer than any test."""
    interval, watcher = sys.getswitchinterval(), Watcher()
    watcher.thread.start()
    sys.setswitchinterval(1000)
    yield watcher
    sys.setswitchinterval(interval)
    watcher.ended = True
    watcher.thread.join()


@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="there is no GIL")
@pytest.mark.parametrize("name", CALLS)
def test_other_threads_run_within_calls(watcher, name):
    before = _core.default_num_threads()
    cpattn.set_num_threads(1)
    try:
        assert watcher.counts_within(CALLS[name], wanted=5, calls=2000) >= 5
    finally:
        cpattn.set_num_threads(before)


def test_a_call_that_keeps_the_gil_would_be_seen(watcher):
    numbers = list(range(100_000))
    assert watcher.counts_within(lambda: sum(numbers), wanted=5, calls=100) == 0
