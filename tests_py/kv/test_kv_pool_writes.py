# SPDX-License-Identifier: Apache-2.0
"""Rows written to KV pools: their places, their codes, and refused rows."""

import ml_dtypes
import numpy as np
import pytest
import torch

import cpattn
from support.cases import DTYPES, strided_copy
from support.pairwise import pairwise
from support.tolerances import SMALLEST

FP8 = "float8_e4m3fn"
POOL_DTYPES = (*DTYPES, FP8)
LAYERS, HEADS, DIM, V_DIM, PAGE = 2, 3, 24, 40, 4
SCALED = {"dtype": "int8", "scale_dtype": "float16"}


def make_pool(dtype="bfloat16", scale_dtype=None, **options):
    return cpattn.kv.MHATokenToKVPool(
        size=60, page_size=PAGE, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        v_head_dim=V_DIM, dtype=dtype, scale_dtype=scale_dtype, **options,
    )  # fmt: skip


def mla_pool(**options):
    return cpattn.kv.MLATokenToKVPool(
        size=60, page_size=PAGE, num_layers=2, kv_lora_rank=32, qk_rope_head_dim=8,
        **{"index_head_dim": 16, **options},
    )  # fmt: skip


def make_rows(tokens, dim, dtype="float32", seed=0, *, special=False):
    """Return numbers of all sizes, so that casts round, overflow and underflow.

    With `special`, some heads have only zeros, and some have NaN or an infinity.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HEADS, dim, generator=generator)
    x *= torch.exp2(torch.randint(-20, 18, x.shape, generator=generator))
    if special:
        x[1, 0], x[2, 1], x[3, 2, 5], x[4, 0, 7], x[5, 1, 0] = 0, 1e-39, torch.nan, torch.inf, -7e7
    return strided_copy(x.to(getattr(torch, dtype)))


def special_rows(tokens, dtype="float32"):
    return [make_rows(tokens, *of, special=True) for of in ((DIM, dtype), (V_DIM, dtype, 1))]


def bits(x):
    """Return the bits of every element, with equal bits for all NaN."""
    nan = x.float().isnan()
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]
    return x.contiguous().view(unsigned).masked_fill(nan, -1 if x.itemsize > 1 else 0x7F)


def stored(rows, dtype, scale):
    """Convert rows like a pool, by the definition in torch."""
    dtype = getattr(torch, dtype)
    return rows if rows.dtype == dtype else (rows.float() / float(scale or 1)).to(dtype)


def snapshot(pool):
    """Return the bytes of all buffers, [buffer, slot, byte of the row]."""
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
        pool.set_kv_buffer(1, slots, k, v, k_scale=k_scale, v_scale=v_scale)
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
        pool.set_kv_buffer(0, [9, 8, -1, 20, 21, 30], some_k, some_v)
    assert_same_bytes(*pools)


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_numpy_and_torch_agree(dtype):
    k, v = make_rows(5, DIM, "bfloat16"), make_rows(5, V_DIM, "float16", 1)
    ours = make_pool(dtype, container="numpy")
    theirs = make_pool(getattr(torch, dtype), container="torch")
    theirs.set_kv_buffer(1, [3, 1, 63, 0, 7], k, v)
    k_array = k.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    ours.set_kv_buffer(1, np.array([3, 1, 63, 0, 7], np.int32), k_array, v.numpy())
    for get in ("get_key_buffer", "get_value_buffer"):
        array, tensor = getattr(ours, get)(1), getattr(theirs, get)(1)
        assert array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert np.array_equal(array.view(np.uint8), tensor.view(torch.uint8).numpy())


def test_fp8_is_stored_as_bytes():
    pool = make_pool(FP8)
    assert (pool.dtype, pool.store_dtype) == (FP8, "uint8")
    assert pool.k_buffer.dtype == torch.uint8
    assert pool.get_key_buffer(0).dtype == torch.float8_e4m3fn
    codes = torch.arange(256, dtype=torch.uint8)[: HEADS * DIM]
    v = torch.zeros(1, HEADS, V_DIM).to(torch.float8_e4m3fn)
    pool.set_kv_buffer(0, [4], codes, v, k_scale=7.0)  # copied, not scaled
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
        assert torch.equal(bits(got), bits(stored(both[[0, 1, 3, 4], 0, 32:], dtype, 3)))


@pytest.mark.parametrize("dtype", POOL_DTYPES)
def test_keys_of_the_indexer(dtype):
    pool = mla_pool(dtype=dtype, start_layer=2)
    rows = torch.randn(4, 16)
    pool.set_index_k_buffer(3, torch.tensor([63, 4, -1, 5]), rows)
    got = pool.get_index_k_buffer(3).reshape(64, 16)
    assert torch.equal(bits(got[[63, 4, 5]]), bits(stored(rows[[0, 1, 3]], dtype, None)))
    assert not pool.k_buffer.view(torch.uint8).any()
    assert not pool.get_index_k_buffer(2).view(torch.uint8).any()


LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
SCALES = ("float32", "float16", "bfloat16")


def codes_of(x, scale, dtype):
    """Return codes by definition: saturated, with NaN, and with infinities if the dtype has any."""
    x = x.float() / scale
    limit = LARGEST[dtype]
    if dtype == "int8":
        return x.round().clamp(-limit, limit).nan_to_num(-128).to(torch.int8)
    kept = x.isnan() | (x.isinf() if dtype == "float8_e5m2" else torch.zeros_like(x).bool())
    return torch.where(kept, x, x.clamp(-limit, limit)).to(getattr(torch, dtype))


def scales_of(x, dtype, scale_dtype):
    """Return the stored scale of each token and head [tokens, heads]."""
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
    """Return whether all numbers are equal, with NaN in equal places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def raw(x):
    """Return codes as bytes, with 0x7f for a NaN of either sign."""
    codes = x.contiguous().view(torch.uint8)
    return codes if x.dtype == torch.int8 else codes.masked_fill(x.float().isnan(), 0x7F)


@pytest.mark.parametrize(
    ("given_as", "dtype", "use_fia"), pairwise(DTYPES, [*LARGEST], [False, True])
)
def test_a_scale_for_all_or_for_each_head(isa, given_as, dtype, use_fia):
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:37]
    k, v = special_rows(37, given_as)
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
    k, v = special_rows(37, given_as)
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
    """Rows keep their scales when read from a pool and written to another, as between ranks."""
    first, second = make_pool(dtype, scale_dtype), make_pool(dtype, scale_dtype, use_fia=True)
    slots = [9, 8, 61, 20, 21, 30]
    first.set_kv_buffer(1, slots, *special_rows(6))
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


POOL, KEEPING = make_pool("int8"), make_pool("int8", "float16")
K, V = torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, V_DIM)
CODES = K.to(torch.int8), V.to(torch.int8)
OF_TOKENS = torch.ones(2, HEADS).half()
OWN = KEEPING.get_key_scale_buffer(0)[0, :2]
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
        (write(KEEPING, K, V, 0.5), f"k_scale {KEEPS}"),
        (write(KEEPING, K, V, None, torch.ones(HEADS)), f"v_scale {KEEPS}"),
        (write(KEEPING, *CODES), r"k_scale must be given with codes: 2 \* 3 scales of float16"),
        (
            write(KEEPING, *CODES, OF_TOKENS, OF_TOKENS.float()),
            "v_scale must be float16, got float",
        ),
        (
            write(KEEPING, *CODES, OF_TOKENS[:1], OF_TOKENS),
            r"k_scale must have 2 \* 3 = 6 elements",
        ),
        (write(KEEPING, *CODES, OF_TOKENS, OWN), "the layer's k_scale must not overlap v_scale in"),
        (lambda: POOL.get_key_scale_buffer(0), "the pool has no k_scale, it has k, v"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=rf"^(MHATokenToKVPool|[sg]et_\w+_buffer): {message}"):
        call()
    for pool in (POOL, KEEPING):
        assert not any(buffer.bytes.any() for buffer in pool._buffers.values())
