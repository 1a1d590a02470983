# SPDX-License-Identifier: Apache-2.0
"""Senders that hold some of the pages each, and a receiver that ends up with all their bytes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer import KVLayout, LocalEngine, plan_kv_transfer, register
from cpattn.transfer.sglang_0_5_23 import (
    KVArgs,
    KVSender,
    fill_kv_args,
    plan_send_indices,
    plan_send_kvcache,
)
from support.examples import examples

PAGE = 4
NUMPY = {"page_size": PAGE, "container": "numpy"}
FLOATS = NUMPY | {"dtype": "float32"}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "index_head_dim": 4}
POOLS = {
    "mha": partial(MHATokenToKVPool, num_kv_heads=2, head_dim=4, **FLOATS),
    "mla": partial(MLATokenToKVPool, **LATENT, **FLOATS),
    "dsa": partial(DSATokenToKVPool, **NUMPY),
}


def make_pool(kind, size, layers, start=0):
    return POOLS[kind](size=size, num_layers=layers, start_layer=start)


def pages_of(pool):
    """The memory of each buffer of a pool, as bytes [pages, item_len]."""
    views = []
    for addr, nbytes, item_len in zip(*pool.get_contiguous_buf_infos(), strict=True):
        memory = (np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(addr)
        views.append(np.frombuffer(memory, np.uint8).reshape(-1, item_len))
    return views


def striped(kind, logical, size, rng):
    """Pools of ranks that stripe the pages of a logical cache, which is returned, too."""
    num_pages = 1 + max(logical) // size
    pools = [make_pool(kind, num_pages * PAGE, 2) for _ in range(size)]
    for pool in pools:
        for view in pages_of(pool):
            view[:] = rng.integers(0, 256, view.shape, np.uint8)
    whole = [
        np.stack([pages_of(pools[page % size])[i][page // size] for page in logical])
        for i in range(len(pages_of(pools[0])))
    ]
    return pools, whole


def layout_plan(pool, receiver, src, dst):
    return plan_kv_transfer(KVLayout.from_pool(pool), KVLayout.from_pool(receiver), src, dst)


def list_plan(pool, receiver, src, dst):
    """Plan as engines that know flat lists."""
    sender, peer = KVArgs(), KVArgs()
    fill_kv_args(sender, pool)
    fill_kv_args(peer, receiver)
    return plan_send_kvcache(
        sender, peer.kv_data_ptrs, src, dst, pp_size=1, is_mla=True, dst_item_lens=peer.kv_item_lens
    )


@pytest.mark.parametrize("planned", [layout_plan, list_plan])
@pytest.mark.parametrize("kind", POOLS)
@settings(deadline=None, max_examples=examples(25))
@given(data=st.data(), size=st.integers(2, 4), seed=st.integers(0, 2**32 - 1))
def test_ranks_that_stripe_pages_fill_a_plain_pool(kind, planned, data, size, seed):
    rng = np.random.default_rng(seed)
    num_pages = data.draw(st.integers(1, 14))
    logical = (size + rng.permutation(20)[:num_pages]).tolist()  # the first pages are padding
    pools, whole = striped(kind, logical, size, rng)
    receiver = make_pool(kind, 20 * PAGE, 2)
    views = pages_of(receiver)
    for view in views:
        view[:] = 0xA5
    dst_pages = 1 + rng.permutation(20)[:num_pages]
    ends = sorted({num_pages, *data.draw(st.lists(st.integers(1, num_pages), max_size=2))})
    written = np.zeros(21, int)
    with LocalEngine() as engine, LocalEngine() as peer:
        register(engine, *pools)
        register(peer, receiver)
        for rank, pool in enumerate(pools):
            sender = KVSender(kv_shard_rank=rank, kv_shard_size=size)
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                chunk = plan_send_indices(
                    sender, logical[start:end], curr_idx=start, num_kv_indices=num_pages
                )
                src, dst = chunk.select(dst_pages)
                plan = planned(pool, receiver, src, dst)
                written[dst] += 1
                assert plan.total_bytes == len(src) * sum(view.shape[1] for view in views)
                plan.execute(engine, peer.session_id)
    assert np.flatnonzero(written).tolist() == sorted(dst_pages.tolist())
    assert written.max() == 1
    for view, pages in zip(views, whole, strict=True):
        np.testing.assert_array_equal(view[dst_pages], pages)
        others = np.setdiff1d(np.arange(len(view)), dst_pages)
        assert (view[others] == 0xA5).all()
