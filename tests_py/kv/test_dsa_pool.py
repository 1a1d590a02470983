# SPDX-License-Identifier: Apache-2.0
"""A pool of FP8 rows has the right bytes, and can be transferred."""

import ctypes

import numpy as np
import pytest
import torch

import cpattn
from cpattn.sparse import quantize_index, quantize_kv_rows, write_index_k_cache
from cpattn.transfer import KVLayout, plan_kv_transfer
from support.transfer.plan_blocks import blocks

PAGE, PAGES = 16, 5
GENERATOR = torch.Generator().manual_seed(3)
LATENT = torch.randn(7, 576, generator=GENERATOR).bfloat16()
INDEX_K = torch.randn(7, 128, generator=GENERATOR).bfloat16()
SLOTS = [40, 16, -1, 79, 0, 17, 63]
KEPT = [i for i, slot in enumerate(SLOTS) if slot >= 0]


def make_pool(**options):
    return cpattn.kv.DSATokenToKVPool(
        size=64, page_size=PAGE, num_layers=2, start_layer=4, **{"index_head_dim": 128, **options}
    )


def rows_of(pool, layer):
    return pool.get_key_buffer(layer).reshape(PAGE * PAGES, 656)


def test_rows_are_those_of_quantize_kv_rows(isa):
    expected = quantize_kv_rows(LATENT[:, :512], LATENT[:, 512:])[:, 0]
    ways = [
        (LATENT, None),
        (LATENT.unsqueeze(1), None),
        (LATENT[:, :512], LATENT[:, 512:]),
        (LATENT[:, None, :512], LATENT[:, None, 512:]),
        (expected, None),
        (expected.unsqueeze(1), None),
    ]
    for k, v in ways:
        pool = make_pool()
        pool.set_kv_buffer(5, SLOTS, k, v)
        written = rows_of(pool, 5)
        assert torch.equal(written[[SLOTS[i] for i in KEPT]], expected[KEPT])
        assert written.any(1).sum() == len(KEPT)
        assert not rows_of(pool, 4).any()
    pool = make_pool()
    pool.set_kv_buffer(4, SLOTS, LATENT, layer_id_override=5)
    assert torch.equal(rows_of(pool, 5), written)


def test_keys_of_the_indexer_are_those_of_write_index_k_cache():
    expected = torch.zeros(PAGES, PAGE * 132, dtype=torch.uint8)
    write_index_k_cache(expected, SLOTS, INDEX_K)
    for given in ((INDEX_K,), quantize_index(INDEX_K)):
        pool = make_pool()
        pool.set_index_k_buffer(5, SLOTS, *given)
        assert torch.equal(pool.get_index_k_buffer(5), expected)
        assert not pool.get_index_k_buffer(4).any()


def test_buffers():
    pool = make_pool()
    addrs, sizes, item_lens = pool.get_contiguous_buf_infos()
    assert item_lens == [PAGE * 656] * 2 + [PAGE * 132] * 2
    assert sizes == [PAGES * length for length in item_lens]
    assert pool.get_index_k_buffer(5).data_ptr() == addrs[3]
    assert pool.get_state_buf_infos() == tuple(infos[2:] for infos in (addrs, sizes, item_lens))
    assert (pool.dtype, pool.store_dtype, pool.kinds) == ("fp8_ds_mla", "uint8", ("k", "index_k"))
    assert pool.k_buffer.shape == (2, PAGES, PAGE, 1, 656)
    assert pool.index_k_buffer.shape == (2, PAGES, PAGE * 132)
    assert pool.v_buffer is None
    assert "fp8_ds_mla" in repr(pool)
    bare = make_pool(index_head_dim=None, container="numpy")
    assert bare.kinds == ("k",)
    assert bare.index_k_buffer is None
    assert bare.get_state_buf_infos() == ([], [], [])
    bare.set_kv_buffer(4, np.array([3]), np.ones((1, 576), np.float32))
    assert bare.get_key_buffer(4)[0, 3, 0, 0] == 0x7E  # code of 448


def test_transfer_of_rows_and_whole_pages():
    source, destination = make_pool(), make_pool()
    for layer in (4, 5):
        source.set_kv_buffer(layer, SLOTS, LATENT * layer)
        source.set_index_k_buffer(layer, SLOTS, INDEX_K * layer)
    layouts = [KVLayout.from_pool(pool) for pool in (source, destination)]
    assert [entry.token_rows for entry in layouts[0].entries] == [True, True, False, False]
    plan = plan_kv_transfer(*layouts, [1, 2, 4], [4, 1, 2])
    for src, dst, length in blocks(plan):
        ctypes.memmove(dst, src, length)
    for layer in (4, 5):
        for get in ("get_key_buffer", "get_index_k_buffer"):
            expected = torch.zeros_like(getattr(source, get)(layer))
            expected[[4, 1, 2]] = getattr(source, get)(layer)[[1, 2, 4]]
            assert torch.equal(getattr(destination, get)(layer), expected)
    with pytest.raises(ValueError, match="index_k of layer 4 is not rows of tokens"):
        plan_kv_transfer(*layouts, [1, 2], [4, 1], first_token=3, num_tokens=20)
    bare = [KVLayout.from_pool(make_pool(index_head_dim=None)) for _ in range(2)]
    plan = plan_kv_transfer(*bare, [1, 2], [4, 1], first_token=3, num_tokens=20)
    assert plan.total_bytes == 2 * 20 * 656


POOL, BARE = make_pool(), make_pool(index_head_dim=None)


def write(k, v=None, slot=1, layer=4):
    return lambda: POOL.set_kv_buffer(layer, [slot], k, v)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_pool(index_head_dim=64), "DSATokenToKVPool: index_head_dim must be 128 or N"),
        (write(LATENT[:1, :512]), r"k must be \[num_tokens, 576 or 656\] without v, got shape \[1"),
        (write(LATENT[:1], LATENT[:1, :64]), r"k must be \[num_tokens, 512\] with v, got shape"),
        (write(LATENT[:2]), "k must have a row for each of 1 slots, got 2"),
        (write(torch.zeros(1, 656)), "k must be uint8 if it is 656 wide, got float32"),
        (write(LATENT[:1], slot=80), r"loc must be in \[-1, 80\), got 80 at index 0"),
        (write(LATENT[:1], layer=6), r"layer_id must be in \[4, 6\), got 6"),
        (lambda: POOL.set_index_k_buffer(6, [1], INDEX_K[:1]), r"layer_id must be in \[4, 6\), go"),
        (lambda: BARE.set_index_k_buffer(4, [1], INDEX_K[:1]), "the pool has no index_k, it has k"),
        (lambda: POOL.get_value_buffer(4), "the pool has no v, it has k, index_k"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"^([gs]et_(index_k|kv|value)_buffer: )?{message}"):
        call()
    assert not POOL.k_buffer.any()
