# SPDX-License-Identifier: Apache-2.0
"""Rows written to KV pools: where they land, what becomes of them, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cases import DTYPES, strided_copy
from support.examples import examples
from support.pairwise import pairwise

FP8 = "float8_e4m3fn"
POOL_DTYPES = (*DTYPES, FP8)
LAYERS, HEADS, DIM, V_DIM, PAGE = 3, 2, 24, 40, 4
SCALED = {"dtype": "int8", "scale_dtype": "float16"}


def make_pool(dtype="bfloat16", size=60, **options):
    return cpattn.kv.MHATokenToKVPool(
        size=size, page_size=PAGE, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        v_head_dim=V_DIM, dtype=dtype, start_layer=5, **options,
    )  # fmt: skip


def mla_pool(**options):
    return cpattn.kv.MLATokenToKVPool(
        size=60, page_size=PAGE, num_layers=2, kv_lora_rank=32, qk_rope_head_dim=8,
        **{"index_head_dim": 16, **options},
    )  # fmt: skip


def make_rows(tokens, dim, dtype="float32", seed=0):
    """Numbers of all sizes, so that casts round, overflow and underflow."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HEADS, dim, generator=generator)
    x *= torch.exp2(torch.randint(-20, 18, x.shape, generator=generator))
    return strided_copy(x.to(getattr(torch, dtype)))


def bits(x):
    """Return the bits of every element, any NaN being as good as another."""
    nan = x.float().isnan()
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return x.contiguous().view(unsigned).masked_fill(nan, -1 if x.itemsize > 1 else 0x7F)


def stored(rows, dtype, scale):
    """Convert rows as a pool does: the definition in torch."""
    dtype = getattr(torch, dtype)
    return rows if rows.dtype == dtype else (rows.float() / float(scale or 1)).to(dtype)


def snapshot(pool):
    """The bytes of all buffers, [buffer, slot, byte of the row]."""
    return [
        layer.contiguous().view(torch.uint8).reshape(pool.num_pages * PAGE, -1).clone()
        for kind in pool.kinds
        for layer in pool._layers[kind]
    ]


def assert_same_bytes(*pools):
    first, *others = map(snapshot, pools)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("given_as", "dtype", "use_fia"), pairwise(DTYPES, POOL_DTYPES, [False, True])
)
def test_rows_are_those_of_the_definition(isa, given_as, dtype, use_fia):
    pool = make_pool(dtype, use_fia=use_fia)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:37]
    k, v = make_rows(37, DIM, given_as), make_rows(37, V_DIM, given_as, 1)
    for k_scale, v_scale in [(None, None), (0.37, torch.tensor([3.0]))]:
        before, k_before, v_before = snapshot(pool), k.clone(), v.clone()
        pool.set_kv_buffer(6, slots, k, v, k_scale=k_scale, v_scale=v_scale)
        assert torch.equal(k, k_before)
        assert torch.equal(v, v_before)
        for buffer, (old, now) in enumerate(zip(before, snapshot(pool), strict=True)):
            if buffer % LAYERS == 1:
                rows, scale = (k, k_scale) if buffer < LAYERS else (v, v_scale)
                expected = stored(rows, dtype, scale)
                got = now[slots].view(expected.dtype).reshape(expected.shape)
                assert torch.equal(bits(got), bits(expected))
                now[slots] = old[slots]
            assert torch.equal(now, old)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_last_row_of_a_slot_counts(data):
    slots = data.draw(st.lists(st.integers(-1, 63), max_size=200))
    pool = make_pool("float32")
    k, v = make_rows(len(slots), DIM), make_rows(len(slots), V_DIM, seed=1)
    expected = [torch.zeros(64, HEADS, dim) for dim in (DIM, V_DIM)]
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot], expected[1][slot] = k[i], v[i]
    given_as = data.draw(st.sampled_from([list, tuple, np.int32, np.int64, torch.tensor]))
    loc = given_as(slots) if slots else []
    pool.set_kv_buffer(5, loc, k, v)
    assert torch.equal(pool.get_key_buffer(5).reshape(expected[0].shape), expected[0])
    assert torch.equal(pool.get_value_buffer(5).reshape(expected[1].shape), expected[1])


@pytest.mark.parametrize("options", [{}, {"dtype": FP8}, SCALED], ids=["bfloat16", FP8, "scaled"])
def test_rows_of_any_shape_and_strides(options):
    k, v = make_rows(6, DIM), make_rows(6, V_DIM, "bfloat16", 1)
    shapes = [
        (k, v),
        (k.contiguous(), v.contiguous()),
        (k.reshape(6, -1), v.reshape(6, -1)),
        (k.reshape(-1), v.reshape(6 * HEADS, V_DIM)),
        (k.unsqueeze(1), v.unsqueeze(0)),
        (k.transpose(0, 1).contiguous().transpose(0, 1), strided_copy(v.reshape(2, 3, HEADS, -1))),
        (strided_copy(k.reshape(6, HEADS, 3, 8)), strided_copy(v.reshape(6 * HEADS * 5, 8))),
    ]
    pools = [make_pool(**options) for _ in shapes]
    for pool, (some_k, some_v) in zip(pools, shapes, strict=True):
        pool.set_kv_buffer(5, [9, 8, -1, 20, 21, 30], some_k, some_v)
    assert_same_bytes(*pools)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_numpy_and_torch_agree(dtype):
    k, v = make_rows(5, DIM, "bfloat16"), make_rows(5, V_DIM, "float16", 1)
    ours = make_pool(dtype, container="numpy")
    theirs = make_pool(getattr(torch, dtype), container="torch")
    theirs.set_kv_buffer(6, [3, 1, 63, 0, 7], k, v)
    k_array = k.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    ours.set_kv_buffer(6, np.array([3, 1, 63, 0, 7], np.int32), k_array, v.numpy())
    for get in ("get_key_buffer", "get_value_buffer"):
        array, tensor = getattr(ours, get)(6), getattr(theirs, get)(6)
        assert array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert np.array_equal(array.view(np.uint8), tensor.view(torch.uint8).numpy())


def test_fp8_is_stored_as_bytes():
    pool = make_pool(FP8)
    assert (pool.dtype, pool.store_dtype) == (FP8, "uint8")
    assert pool.k_buffer.dtype == torch.uint8
    assert pool.get_key_buffer(5).dtype == torch.float8_e4m3fn
    codes = torch.arange(256, dtype=torch.uint8)[: HEADS * DIM]
    v = torch.zeros(1, HEADS, V_DIM).to(torch.float8_e4m3fn)
    pool.set_kv_buffer(5, [4], codes, v, k_scale=7.0)  # copied, not scaled
    assert torch.equal(pool.k_buffer[0, 1, 0].flatten(), codes)


@pytest.mark.parametrize(
    ("given_as", "dtype"), pairwise(DTYPES, [*POOL_DTYPES, "float8_e5m2", "int8"])
)
def test_keys_that_hold_both_parts_are_split(dtype, given_as):
    both = strided_copy(torch.randn(5, 1, 40).to(getattr(torch, given_as)))
    split, apart = mla_pool(dtype=dtype), mla_pool(dtype=dtype)
    slots = [7, 60, -1, 0, 63]
    split.set_kv_buffer(1, slots, both, None, k_scale=0.5, v_scale=3)
    apart.set_kv_buffer(1, slots, both[..., :32], both[..., 32:], 0.5, 3)
    assert_same_bytes(split, apart)
    if dtype in POOL_DTYPES:
        got = split.get_value_buffer(1).reshape(64, 8)[[7, 60, 0, 63]]
        expected = stored(both[[0, 1, 3, 4], 0, 32:], dtype, 3)
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_keys_of_the_indexer(dtype):
    pool = mla_pool(dtype=dtype, start_layer=2)
    rows = torch.randn(4, 16)
    pool.set_index_k_buffer(3, torch.tensor([63, 4, -1, 5]), rows)
    got = pool.get_index_k_buffer(3).reshape(64, 16)
    assert torch.equal(bits(got[[63, 4, 5]]), bits(stored(rows[[0, 1, 3]], dtype, None)))
    assert not pool.k_buffer.view(torch.uint8).any()
    assert not pool.get_index_k_buffer(2).view(torch.uint8).any()
