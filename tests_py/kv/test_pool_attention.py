# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention that writes and reads KV pools, in both layouts."""

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import cpattn  # noqa: E402
from cpattn.distributed import ContextParallel  # noqa: E402
from support.cases import assert_attention  # noqa: E402

PAGE_SIZE, HEADS, DIM = 4, 2, 16
LENS, BLOCK_TABLES = [14, 6], np.array([[5, 2, 7, 1], [3, 6, -1, -1]], np.int32)


@pytest.fixture
def one_rank() -> Iterator[ContextParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(dist.group.WORLD, page_size=PAGE_SIZE)
    dist.destroy_process_group()


@pytest.mark.parametrize("use_fia", [False, True])
def test_context_parallel_writes_and_reads_a_pool(one_rank: ContextParallel, use_fia: bool) -> None:
    pool = cpattn.kv.MHATokenToKVPool(
        size=40, page_size=PAGE_SIZE, num_layers=3, num_kv_heads=HEADS, head_dim=DIM,
        dtype="float32", start_layer=7, use_fia=use_fia,
    )  # fmt: skip
    caches = pool.get_key_buffer(8), pool.get_value_buffer(8)
    for buffer in caches:
        buffer.fill_(torch.nan)
    plan = one_rank.plan(LENS, block_tables=BLOCK_TABLES)
    k, v, q = torch.randn(3, 20, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    one_rank.write_kv(plan, *(one_rank.shard(plan, x) for x in (k, v)), *caches)
    out = one_rank.gather(plan, one_rank.attend(plan, one_rank.shard(plan, q), *caches))
    k_cache, v_cache = (cache.reshape(-1, PAGE_SIZE, HEADS, DIM) for cache in caches)
    assert torch.equal(k_cache.flatten(0, 1)[plan.slots.tolist()], k)
    assert torch.count_nonzero(k_cache.isnan()) == (44 - 20) * HEADS * DIM
    lens = {"q_lens": LENS, "kv_lens": LENS, "block_tables": BLOCK_TABLES}
    assert_attention(out, None, {"q": q, "k_cache": k_cache, "v_cache": v_cache, **lens})
