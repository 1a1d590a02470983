# SPDX-License-Identifier: Apache-2.0
"""The functions that have a twin in sglang against that twin, over thousands of random cases.

Runs where a wheel of sglang is at hand (see `sglang_upstream`): 0.5.23, or 0.5.18 for the rule by
which stages with several groups of buffers found theirs up to 0.5.19.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from cpattn.transfer import sglang_0_5_23
from support.sglang.sglang_upstream import make_manager
from support.transfer.upstream_cases import knows_drafts, outcome


def random_pages(rng: np.random.Generator, num_pages: int) -> np.ndarray:
    """Runs of consecutive pages, broken at random, some backwards, some repeated."""
    steps = rng.choice([1, 1, 1, 1, 2, 7, 0, -1, -5], num_pages)
    return (100 + np.cumsum(steps)).astype(np.int32)


def test_kv_to_page_indices(sglang, rng):
    for _ in range(1000):
        page_size, num_tokens = rng.integers(1, 65), rng.integers(0, 300)
        first = rng.integers(0, 1000) * page_size
        slots = torch.arange(first, first + num_tokens)
        expected = sglang.pages.kv_to_page_indices(slots, page_size)
        got = sglang_0_5_23.kv_to_page_indices(slots.numpy(), int(page_size))
        np.testing.assert_array_equal(got, expected)


def test_group_concurrent_contiguous(sglang, rng):
    for _ in range(3000):
        src = random_pages(rng, rng.integers(0, 12))
        same = rng.random() < 0.9
        dst = random_pages(rng, len(src) if same else rng.integers(0, 12))
        expected = outcome(sglang.utils.group_concurrent_contiguous, src, dst)
        got = outcome(sglang_0_5_23.group_concurrent_contiguous, src, dst)
        if not isinstance(got, str):
            got = tuple([[int(i) for i in group] for group in side] for side in got)
        assert got == expected, (src, dst)


def test_get_mha_kv_ptrs_with_pp_compat(sglang, rng):
    for _ in range(3000):
        src = list(range(rng.integers(1, 20)))
        dst = list(range(1000, 1000 + rng.integers(0, 60)))
        start = int(rng.integers(0, 12))
        manager = make_manager(sglang, kv_args=SimpleNamespace(prefill_start_layer=start))
        expected = outcome(manager.get_mha_kv_ptrs_with_pp, src, dst)
        ours = sglang_0_5_23.get_mha_kv_ptrs_with_pp
        got = outcome(ours, src, dst, prefill_start_layer=start, compat=True)
        assert got == expected, (src, dst, start)


def test_get_mla_kv_ptrs_with_pp_compat(sglang, rng):
    for _ in range(3000):
        src = list(range(rng.integers(1, 20)))
        dst = list(range(1000, 1000 + rng.integers(0, 60)))
        start, groups = int(rng.integers(0, 8)), int(rng.integers(1, 4))
        hidden, draft = int(rng.integers(0, 20)), int(rng.integers(0, 3))
        known = {"hidden_kv_layers" if knows_drafts(sglang) else "total_kv_layers": hidden}
        sglang.parallel.pp_group.is_last_rank = bool(rng.integers(2))
        kv_args = SimpleNamespace(
            prefill_start_layer=start, kv_buf_groups=groups, total_kv_layers=hidden,
            hidden_kv_layers=hidden, draft_kv_layers=draft, mla_compression_ratios=None,
        )  # fmt: skip
        manager = make_manager(sglang, kv_args=kv_args, pp_size=2, is_mla_backend=True)
        expected = outcome(manager.get_mla_kv_ptrs_with_pp, src, dst)
        got = outcome(
            sglang_0_5_23.get_mla_kv_ptrs_with_pp, src, dst, prefill_start_layer=start,
            kv_buf_groups=groups, draft_kv_layers=draft, compat=True,
            is_last_rank=sglang.parallel.pp_group.is_last_rank, **known,
        )  # fmt: skip
        assert got == expected, (src, dst, start, groups, hidden, draft)
