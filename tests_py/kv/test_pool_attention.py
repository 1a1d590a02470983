# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention over KV pools, in both of their layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import cpattn  # noqa: E402
from cpattn.distributed import ContextParallel  # noqa: E402
from support.cases import assert_attention  # noqa: E402

PAGE_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 4, 2, 16
EXTEND_LENS, SEQ_LENS = [9, 6], [14, 6]
BLOCK_TABLES = np.array([[5, 2, 7, 1], [3, 6, -1, -1]], np.int32)


def make_pool(use_fia: bool) -> Any:
    """A pool whose second layer has random prefixes, and NaN where nothing was written."""
    pool = cpattn.kv.MHATokenToKVPool(
        size=40, page_size=PAGE_SIZE, num_layers=3, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
        dtype="float32", start_layer=7, use_fia=use_fia,
    )  # fmt: skip
    for buffer in (pool.get_key_buffer(8), pool.get_value_buffer(8)):
        buffer.fill_(torch.nan)
    pool.set_kv_buffer(8, slots_of(0, 0, 5), *random_rows(5, seed=1))
    return pool


def slots_of(sequence: int, begin: int, end: int) -> Any:
    position = np.arange(begin, end)
    return BLOCK_TABLES[sequence, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def random_rows(count: int, seed: int, heads: int = NUM_KV_HEADS, num: int = 2) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, count, heads, HEAD_DIM, generator=generator)


def check(out: Any, q: Any) -> None:
    """Compare with the float64 oracle over the same rows, written page by page."""
    prefix, new = random_rows(5, seed=1), random_rows(15, seed=2)
    caches = torch.full((2, 11 * PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    caches[:, slots_of(0, 0, 5)] = prefix
    caches[:, slots_of(0, 5, 14)] = new[:, :9]
    caches[:, slots_of(1, 0, 6)] = new[:, 9:]
    k_cache, v_cache = caches.unflatten(1, (-1, PAGE_SIZE))
    lens = {"q_lens": EXTEND_LENS, "kv_lens": SEQ_LENS, "block_tables": BLOCK_TABLES}
    assert_attention(out, None, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **lens})


@pytest.mark.parametrize("use_fia", [False, True])
@pytest.mark.parametrize("strategy", ["zigzag", "interleave", "contiguous"])
def test_do_cp_attn_fia_reads_a_pool(use_fia: bool, strategy: str) -> None:
    pool = make_pool(use_fia)
    k, v = random_rows(15, seed=2)
    pool.set_kv_buffer(8, np.append(slots_of(0, 5, 14), slots_of(1, 0, 6)), k, v)
    (q,) = random_rows(15, seed=3, heads=NUM_HEADS, num=1)
    ranks = cpattn.build_cp_metadata_all_ranks(EXTEND_LENS, SEQ_LENS, cp_size=2, strategy=strategy)
    sizes = {
        "block_tables": BLOCK_TABLES, "page_size": PAGE_SIZE, "num_heads": NUM_HEADS,
        "num_kv_heads": NUM_KV_HEADS,
    }  # fmt: skip
    parts = [
        cpattn.do_cp_attn_fia(
            metadata.shard(q.flatten(1)), *pool.get_kv_buffer(8), metadata, **sizes, scale=None
        )
        for metadata in ranks
    ]
    out = ranks[0].unshard(parts).view(15, NUM_HEADS, HEAD_DIM)
    check(out, q)


@pytest.fixture
def one_rank() -> Iterator[ContextParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(dist.group.WORLD, page_size=PAGE_SIZE)
    dist.destroy_process_group()


@pytest.mark.parametrize("use_fia", [False, True])
def test_context_parallel_writes_and_reads_a_pool(one_rank: ContextParallel, use_fia: bool) -> None:
    pool = make_pool(use_fia)
    caches = pool.get_key_buffer(8), pool.get_value_buffer(8)
    plan = one_rank.plan(EXTEND_LENS, SEQ_LENS, block_tables=BLOCK_TABLES)
    (q,) = random_rows(15, seed=3, heads=NUM_HEADS, num=1)
    one_rank.write_kv(plan, *(one_rank.shard(plan, x) for x in random_rows(15, seed=2)), *caches)
    out = one_rank.gather(plan, one_rank.attend(plan, one_rank.shard(plan, q), *caches))
    check(out, q)
    assert torch.count_nonzero(caches[0].isnan()) == (44 - 20) * NUM_KV_HEADS * HEAD_DIM
