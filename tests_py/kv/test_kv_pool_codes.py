# SPDX-License-Identifier: Apache-2.0
"""Rows that become codes of 8 bits: with a scale for all, for each head, each token and head."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import cpattn
from support.cases import DTYPES, strided_copy
from support.pairwise import pairwise
from support.tolerances import SMALLEST

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SCALES = ("float32", "float16", "bfloat16")
HEADS, DIM, V_DIM, PAGE = 3, 24, 40, 4


def make_pool(dtype, scale_dtype=None, size=60, **options):
    return cpattn.kv.MHATokenToKVPool(
        size=size, page_size=PAGE, num_layers=2, num_kv_heads=HEADS, head_dim=DIM,
        v_head_dim=V_DIM, dtype=dtype, scale_dtype=scale_dtype, **options,
    )  # fmt: skip


def make_rows(tokens, dim, dtype="float32", seed=0):
    """Numbers of all sizes, some heads of zeros, some with NaN or an infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HEADS, dim, generator=generator)
    x *= torch.exp2(torch.randint(-14, 14, x.shape, generator=generator))
    if tokens > 5:
        x[1, 0], x[2, 1], x[3, 2, 5], x[4, 0, 7], x[5, 1, 0] = 0, 1e-39, torch.nan, torch.inf, -7e7
    return strided_copy(x.to(getattr(torch, dtype)))


def codes_of(x, scale, dtype):
    """The definition in torch: saturating, NaN kept, infinities where there are any."""
    x = x.float() / scale
    limit = LARGEST[dtype]
    if dtype == "int8":
        return x.round().clamp(-limit, limit).nan_to_num(-128).to(torch.int8)
    kept = x.isnan() | (x.isinf() if dtype == "float8_e5m2" else torch.zeros_like(x).bool())
    return torch.where(kept, x, x.clamp(-limit, limit)).to(getattr(torch, dtype))


def scales_of(x, dtype, scale_dtype):
    """The scale of each token and head [tokens, heads], as it is kept."""
    scale_type = getattr(torch, scale_dtype)
    scale = (x.float().abs().amax(-1) / LARGEST[dtype]).clamp(max=torch.finfo(scale_type).max)
    scale[scale < SMALLEST["float32"]] = 0
    scale[~x.float().isfinite().all(-1)] = torch.nan
    return scale.to(scale_type)


def scaled_codes_of(x, scale, dtype):
    wide = scale.float()[..., None]
    codes = codes_of(x, torch.where(wide > 0, wide, 1), dtype).view(torch.uint8)
    codes = torch.where(wide == 0, 0, codes)
    return torch.where(wide.isnan(), 0 if dtype == "int8" else 0x7F, codes)


def same(a, b):
    """Return whether all numbers are equal, NaN where NaN is."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def raw(x):
    """Codes as bytes, a NaN of either sign as 0x7f."""
    codes = x.contiguous().view(torch.uint8)
    return codes if x.dtype == torch.int8 else codes.masked_fill(x.float().isnan(), 0x7F)


@pytest.mark.parametrize(
    ("given_as", "dtype", "use_fia"), pairwise(DTYPES, [*LARGEST], [False, True])
)
def test_a_scale_for_all_or_for_each_head(isa, given_as, dtype, use_fia):
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:37]
    k, v = make_rows(37, DIM, given_as), make_rows(37, V_DIM, given_as, 1)
    of_heads = torch.tensor([0.5, 3.0, 0.017])
    for k_scale, v_scale in [(None, 0.37), (of_heads, torch.tensor([2.0])), (3, of_heads.numpy())]:
        pool = make_pool(dtype, use_fia=use_fia)
        pool.set_kv_buffer(1, slots, k, v, k_scale, v_scale)
        for got, x, scale in zip(pool.get_kv_buffer(1), (k, v), (k_scale, v_scale), strict=True):
            wide = torch.as_tensor(1.0 if scale is None else scale).reshape(-1, 1)
            expected = codes_of(x, wide, dtype)
            assert torch.equal(raw(got.reshape(64, HEADS, -1)[slots]), raw(expected))
        assert not pool.get_key_buffer(0).view(torch.uint8).any()


@pytest.mark.parametrize(("given_as", "dtype", "scale_dtype"), pairwise(DTYPES, [*LARGEST], SCALES))
def test_a_scale_for_each_token_and_head(isa, given_as, dtype, scale_dtype):
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:37]
    k, v = make_rows(37, DIM, given_as), make_rows(37, V_DIM, given_as, 1)
    pool = make_pool(dtype, scale_dtype, use_fia=False)
    pool.set_kv_buffer(1, slots, k, v)
    scales = pool.get_key_scale_buffer(1), pool.get_value_scale_buffer(1)
    for got, scale, x in zip(pool.get_kv_buffer(1), scales, (k, v), strict=True):
        expected = scales_of(x, dtype, scale_dtype)
        assert scale.shape == (pool.num_pages, PAGE, HEADS)
        assert same(scale.reshape(64, HEADS)[slots], expected)
        codes = got.view(torch.uint8).reshape(64, HEADS, -1)
        assert torch.equal(codes[slots], scaled_codes_of(x, expected, dtype))
        unwritten = torch.ones(64, dtype=torch.bool)
        unwritten[slots] = False
        assert not codes[unwritten].any()
        assert not scale.reshape(64, HEADS)[unwritten].any()
    assert not pool.get_key_scale_buffer(0).any()


@pytest.mark.parametrize("scale_dtype", SCALES)
@pytest.mark.parametrize("dtype", LARGEST)
def test_codes_are_copied_with_their_scales(dtype, scale_dtype):
    """Rows read from one pool and written to the next, as between ranks, keep their scales."""
    first, second = make_pool(dtype, scale_dtype), make_pool(dtype, scale_dtype, use_fia=True)
    slots = [9, 8, 61, 20, 21, 30]
    first.set_kv_buffer(1, slots, make_rows(6, DIM), make_rows(6, V_DIM, seed=1))
    tensors = [
        tensor.reshape(64, HEADS, *tensor.shape[3:])[slots]
        for tensor in (*first.get_kv_buffer(1), first.get_key_scale_buffer(1),
                       first.get_value_scale_buffer(1))
    ]  # fmt: skip
    k, v, k_scale, v_scale = tensors
    second.set_kv_buffer(1, slots, k, v.view(torch.uint8) if dtype != "int8" else v,
                         strided_copy(k_scale), v_scale.flatten())  # fmt: skip
    for kind in ("k", "v", "k_scale", "v_scale"):
        a, b = (pool._layers[kind][1].contiguous().view(torch.uint8) for pool in (first, second))
        assert torch.equal(a.flatten(), b.flatten())


@pytest.mark.parametrize("use_fia", [False, True])
@pytest.mark.parametrize("scale_dtype", SCALES)
def test_buffers_of_scales(scale_dtype, use_fia):
    pool = make_pool("int8", scale_dtype, use_fia=use_fia, start_layer=3)
    width = torch.finfo(getattr(torch, scale_dtype)).bits // 8
    assert pool.kinds == ("k", "v", "k_scale", "v_scale")
    assert (pool.dtype, pool.store_dtype, pool.scale_dtype) == ("int8", "int8", scale_dtype)
    addrs, sizes, page_sizes = pool.get_contiguous_buf_infos()
    of_a_page = [PAGE * HEADS * size for size in (DIM, V_DIM, width, width)]
    assert page_sizes == [size for size in of_a_page for _ in range(2)]
    assert sizes == [16 * size for size in page_sizes]
    assert sum(sizes) == pool.nbytes
    scales = pool.get_value_scale_buffer(4)
    assert scales.data_ptr() == addrs[7]
    assert scales.shape == ((64, HEADS) if use_fia else (16, PAGE, HEADS))
    assert f"int8 with scales of {scale_dtype}" in repr(pool)
    array = make_pool("float8_e5m2", scale_dtype, container="numpy").get_key_scale_buffer(0)
    assert array.dtype == np.dtype(getattr(ml_dtypes, scale_dtype, scale_dtype))


POOL, SCALED = make_pool("int8"), make_pool("int8", "float16")
K, V = torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, V_DIM)
CODES = K.to(torch.int8), V.to(torch.int8)
OF_TOKENS = torch.ones(2, HEADS).half()
OWN = SCALED.get_key_scale_buffer(0)[0, :2]
KEEPS = "must be None: the pool keeps scales of each token and head"


def make(*formats):
    return lambda: make_pool(*formats)


def write(pool, *arguments):
    return lambda: pool.set_kv_buffer(0, [1, 2], *arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (make("bfloat16", "float16"), "scale_dtype must be None for a pool of bfloat16"),
        (make("int8", "int8"), "scale_dtype must be float32, float16 or bfloat16, got 'int8'"),
        (make("int4"), "dtype must be .*, float8_e4m3fn, float8_e5m2 or int8, got 'int4'"),
        (make("uint8"), "dtype must be .* got 'uint8'"),
        (write(POOL, K, V, torch.ones(2)), r"k_scale must have shape \[3\], got \[2\]"),
        (write(POOL, K, V, None, torch.ones(HEADS).double()), "v_scale must be float32, got float"),
        (write(POOL, K, V, torch.tensor([1, 0.0, 1])), r"k_scale\[1\] must be a positive number,"),
        (write(POOL, K, V, None, torch.tensor([1, 1, torch.nan])), r"v_scale\[2\] must be a posit"),
        (write(POOL, K.to(torch.uint8), V), "k must be float32, float16 or bfloat16, got uint8"),
        (write(SCALED, K, V, 0.5), f"k_scale {KEEPS}"),
        (write(SCALED, K, V, None, torch.ones(HEADS)), f"v_scale {KEEPS}"),
        (write(SCALED, *CODES), r"k_scale must be given with codes: 2 \* 3 scales of float16"),
        (write(SCALED, *CODES, OF_TOKENS, OF_TOKENS.float()), "v_scale must be float16, got float"),
        (write(SCALED, *CODES, OF_TOKENS[:1], OF_TOKENS), r"k_scale must have 2 \* 3 = 6 elements"),
        (write(SCALED, *CODES, OF_TOKENS, OWN), "the layer's k_scale must not overlap v_scale in"),
        (lambda: POOL.get_key_scale_buffer(0), "the pool has no k_scale, it has k, v"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=rf"^(MHATokenToKVPool|[sg]et_\w+_buffer): {message}"):
        call()
    for pool in (POOL, SCALED):
        assert not any(buffer.bytes.any() for buffer in pool._buffers.values())
