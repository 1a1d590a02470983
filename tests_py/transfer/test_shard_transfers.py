# SPDX-License-Identifier: Apache-2.0
"""Senders that hold a part of the KV cache each, and a receiver that ends up with all its bytes."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpattn.kv import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer import (
    KVArgs,
    KVLayout,
    KVSender,
    LocalEngine,
    fill_kv_args,
    get_layer_shard_range,
    plan_kv_links,
    plan_kv_transfer,
    plan_send_indices,
    plan_send_kvcache,
    register,
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
    """As engines that know flat lists."""
    sender, peer = KVArgs(), KVArgs()
    fill_kv_args(sender, pool)
    fill_kv_args(peer, receiver)
    return plan_send_kvcache(
        sender, peer.kv_data_ptrs, src, dst, pp_size=1, is_mla=True, dst_item_lens=peer.kv_item_lens
    )


@pytest.mark.slow
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


def split_layouts(kind, num_layers, num_ranks):
    """Pools and layouts of ranks that keep a range of a stage's layers each."""
    ranks = []
    for rank in range(num_ranks):
        start, end = get_layer_shard_range(rank, num_ranks, num_layers)
        pool = make_pool(kind, 8 * PAGE, end - start, start) if end > start else None
        layout = (
            KVLayout.from_pool(pool, layers=(start, end))
            if pool
            else KVLayout([], PAGE, layers=(start, end))
        )
        ranks.append((pool, layout))
    return ranks


@pytest.mark.parametrize("kind", POOLS)
@settings(deadline=None, max_examples=examples(25))
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_ranks_that_divide_layers_cover_every_entry_once(kind, num_layers, num_ranks, seed):
    rng = np.random.default_rng(seed)
    receiver = make_pool(kind, 8 * PAGE, num_layers)
    whole = KVLayout.from_pool(receiver)
    views = pages_of(receiver)
    ranks = split_layouts(kind, num_layers, num_ranks)
    num_entries, expected = 0, {}
    with LocalEngine() as engine, LocalEngine() as peer:
        register(peer, receiver)
        for pool, layout in ranks:
            plan = plan_kv_transfer(layout, whole, [3, 4], [6, 2])
            num_entries += sum(count for _, count, _ in plan.parts)
            if pool is None:
                assert len(plan) == 0
                continue
            for entry, view in zip(layout.entries, pages_of(pool), strict=True):
                view[:] = rng.integers(0, 256, view.shape, np.uint8)
                expected[entry.layer_id, entry.kind] = view[[3, 4]]
            register(engine, pool)
            plan.execute(engine, peer.session_id)
    assert num_entries == len(whole.entries) == len(expected)
    for entry, view in zip(whole.entries, views, strict=True):
        np.testing.assert_array_equal(view[[6, 2]], expected[entry.layer_id, entry.kind])
    links = plan_kv_links([layout for _, layout in ranks], [whole], [[3, 4]] * num_ranks, [[6, 2]])
    assert links.total_bytes == 2 * sum(view.shape[1] for view in views)


def test_a_rank_of_a_layer_split_is_planned_like_a_stage():
    """Of flat lists; a stage's first layer is that of its stage and its own."""
    receiver = make_pool("mla", 8 * PAGE, 7)
    peer = KVArgs()
    fill_kv_args(peer, receiver)
    arrived = []
    for rank, (pool, _) in enumerate(split_layouts("mla", 7, 3)):
        args = KVArgs(kv_buf_groups=3, hidden_kv_layers=7)
        fill_kv_args(args, pool)
        plan = plan_send_kvcache(
            args, peer.kv_data_ptrs, [1], [2], pp_size=3, is_mla=True, is_last_rank=rank == 2,
            dst_item_lens=peer.kv_item_lens,
        )  # fmt: skip
        starts = (plan.dst_addrs - 2 * plan.lengths).tolist()
        start, end = get_layer_shard_range(rank, 3, 7)
        wanted = [ptr for group in range(3) for ptr in peer.kv_data_ptrs[7 * group :][start:end]]
        assert starts == wanted
        arrived += starts
    assert sorted(arrived) == sorted(peer.kv_data_ptrs)
