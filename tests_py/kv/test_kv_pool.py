# SPDX-License-Identifier: Apache-2.0
"""KV pools: shapes, descriptions of their memory for engines, and refused arguments."""

import copy
import gc
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpattn
from support.cases import DTYPES
from support.examples import examples

FP8 = "float8_e4m3fn"
POOL_DTYPES = (*DTYPES, FP8)


def golden(use_fia=False, **options):
    """Make a pool of nine pages of 8 tokens with 2 heads of 8 numbers, and two layers."""
    sizes = {"size": 64, "page_size": 8, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    options = {"dtype": "float32", "use_fia": use_fia} | options
    return cpattn.kv.MHATokenToKVPool(**sizes, **options)


def raw(tensor):
    """Return the bytes of a contiguous tensor."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).view(np.uint8).reshape(-1)


def address(tensor):
    return tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor.ctypes.data


@pytest.mark.parametrize("installed", [False, True])
def test_the_container_is_torch_where_it_is_installed(installed, monkeypatch):
    """The process has imported torch, which does not matter."""
    monkeypatch.setattr("cpattn.kv.buffers.find_spec", lambda name: installed or None)
    assert isinstance(golden().k_buffer, torch.Tensor if installed else np.ndarray)


@pytest.mark.parametrize("use_fia", [False, True])
@pytest.mark.parametrize("container", ["torch", "numpy"])
def test_golden_numbers(use_fia, container):
    pool = golden(use_fia, container=container, v_head_dim=16)
    assert pool.num_pages == 9
    addrs, sizes, page_sizes = pool.get_contiguous_buf_infos()
    assert sizes == [4608, 4608, 9216, 9216]
    assert page_sizes == [512, 512, 1024, 1024]
    assert {type(number) for part in (addrs, sizes, page_sizes) for number in part} == {int}
    assert (addrs[1] - addrs[0], addrs[3] - addrs[2]) == (4608, 9216)
    layers = [pool.get_key_buffer(i) for i in range(2)]
    layers += [pool.get_value_buffer(i) for i in range(2)]
    assert addrs == [address(layer) for layer in layers]
    assert not any(addr % 64 for addr in addrs)
    if use_fia:
        assert isinstance(pool.k_buffer, list)
        assert [tuple(layer.shape) for layer in pool.k_buffer] == [(72, 1, 2, 8)] * 2
        assert [tuple(layer.shape) for layer in pool.v_buffer] == [(72, 1, 2, 16)] * 2
    else:
        assert tuple(pool.k_buffer.shape) == (2, 9, 8, 2, 8)
        assert tuple(pool.v_buffer.shape) == (2, 9, 8, 2, 16)
    assert all(not raw(layer).any() for layer in layers)
    assert isinstance(layers[0], torch.Tensor if container == "torch" else np.ndarray)


def test_sizes_of_numpy_do_not_wrap():
    pool = cpattn.kv.MHATokenToKVPool(
        size=np.int32(1 << 20), page_size=np.int32(1 << 10), num_layers=np.int8(2),
        num_kv_heads=np.int16(8), head_dim=np.int32(1 << 10),
        start_layer=np.int8(126), dtype=np.dtype("float16"), container="numpy",
    )  # fmt: skip
    for numbers in pool.get_contiguous_buf_infos():
        assert {type(number) for number in numbers} == {int}
    _, sizes, page_sizes = pool.get_contiguous_buf_infos()
    assert page_sizes == [1 << 24] * 4
    assert sizes == [1025 << 24] * 4
    assert pool.end_layer == 128
    assert pool.get_key_buffer(127).dtype == np.float16


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_item_length_times_pages_is_the_length_of_every_buffer(data):
    small = st.integers(1, 9)
    size, page_size, layers = data.draw(st.integers(0, 300)), data.draw(small), data.draw(small)
    options = {
        "size": size,
        "page_size": page_size,
        "num_layers": layers,
        "dtype": data.draw(st.sampled_from(POOL_DTYPES)),
        "start_layer": data.draw(st.integers(0, 70)),
        "use_fia": data.draw(st.booleans()),
        "container": data.draw(st.sampled_from(["torch", "numpy"])),
    }
    heads, dim, v_dim = (data.draw(small) for _ in range(3))
    if data.draw(st.booleans()):
        pool = cpattn.kv.MHATokenToKVPool(
            num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, **options
        )
        widths = [heads * dim, heads * v_dim]
    else:
        index = data.draw(st.none() | small)
        pool = cpattn.kv.MLATokenToKVPool(
            kv_lora_rank=dim, qk_rope_head_dim=v_dim, index_head_dim=index, **options
        )
        widths = [dim, v_dim, *([index] if index else [])]
    itemsize = {"float32": 4, FP8: 1}.get(options["dtype"], 2)
    addrs, sizes, page_sizes = pool.get_contiguous_buf_infos()
    assert pool.num_pages == size // page_size + 1
    assert len(addrs) == len(sizes) == len(page_sizes) == layers * len(pool.kinds)
    assert page_sizes == [page_size * w * itemsize for w in widths for _ in range(layers)]
    assert sizes == [page * pool.num_pages for page in page_sizes]
    assert pool.get_kv_size_bytes() == tuple(layers * size for size in sizes[::layers])
    assert pool.nbytes == sum(sizes)
    for start in range(0, len(addrs), layers):  # layers of a kind are adjacent
        step = sizes[start]
        assert addrs[start : start + layers] == [addrs[start] + i * step for i in range(layers)]
    assert address(pool.get_value_buffer(pool.end_layer - 1)) == addrs[2 * layers - 1]


@pytest.mark.parametrize("index_head_dim", [None, 16])
def test_mla_shapes_do_not_depend_on_fia(index_head_dim, monkeypatch):
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    for use_fia in (None, True, False):
        pool = cpattn.kv.MLATokenToKVPool(
            size=64, page_size=8, num_layers=2, kv_lora_rank=32, qk_rope_head_dim=8,
            index_head_dim=index_head_dim, dtype="float32", use_fia=use_fia,
        )  # fmt: skip
        assert tuple(pool.k_buffer.shape) == (2, 9, 8, 1, 32)
        assert tuple(pool.v_buffer.shape) == (2, 9, 8, 1, 8)
        assert tuple(pool.get_key_buffer(1).shape) == (9, 8, 1, 32)
        infos = pool.get_contiguous_buf_infos()
        if index_head_dim is None:
            assert pool.kinds == ("k", "v")
            assert pool.index_k_buffer is None
            assert pool.get_state_buf_infos() == ([], [], [])
        else:
            assert pool.kinds == ("k", "v", "index_k")
            assert tuple(pool.index_k_buffer.shape) == (2, 9, 8, 1, 16)
            assert pool.get_state_buf_infos() == tuple(part[-2:] for part in infos)
            assert address(pool.get_index_k_buffer(0)) == infos[0][4]


@pytest.mark.parametrize(
    ("text", "expected"), [(None, False), ("", False), ("0", False), ("1", True), ("True", True)]
)
def test_the_environment_decides_at_construction(text, expected, monkeypatch):
    monkeypatch.delenv("ASCEND_USE_FIA", raising=False)
    if text is not None:
        monkeypatch.setenv("ASCEND_USE_FIA", text)
    pool, forced = golden(None), golden(not expected)
    monkeypatch.setenv("ASCEND_USE_FIA", "0" if expected else "1")
    assert (pool.use_fia, forced.use_fia) == (expected, not expected)
    assert isinstance(pool.k_buffer, list) is expected
    monkeypatch.setenv("ASCEND_USE_FIA", "maybe")
    with pytest.raises(ValueError, match=r"^MHATokenToKVPool: ASCEND_USE_FIA must .*'maybe'"):
        golden(None)


def test_layers_are_known_by_their_number_in_the_model():
    class Attention:
        layer_id = 4

    pool = golden(start_layer=3)
    assert (pool.start_layer, pool.end_layer, pool.num_layers, pool.layer_num) == (3, 5, 2, 2)
    rows = torch.ones(1, 2, 8)
    pool.set_kv_buffer(Attention, [8], rows, rows)
    pool.set_kv_buffer(Attention(), [9], rows, rows, layer_id_override=3)
    assert pool.get_key_buffer(4)[1, 0].eq(1).all()
    assert pool.get_value_buffer(Attention)[1, 1].eq(0).all()
    keys, values = pool.get_kv_buffer(3)
    assert keys[1, 1].eq(1).all()
    assert values[1, 0].eq(0).all()


@pytest.mark.parametrize("use_fia", [False, True])
def test_views_outlive_their_pool(use_fia):
    pool = golden(use_fia)
    pool.set_kv_buffer(1, [71], torch.full((1, 2, 8), 7.0), torch.zeros(1, 2, 8))
    view = pool.get_key_buffer(1)
    del pool
    gc.collect()
    assert view.reshape(72, 16)[71].eq(7).all()
    view.fill_(3)
    assert view.eq(3).all()


def test_repr_says_what_is_in_it():
    assert repr(golden()) == (
        "MHATokenToKVPool(k, v of layers [0, 2), 9 pages of 8 tokens, float32, 1.72e-05 GiB)"
    )
    assert "float8_e4m3fn, FIA, " in repr(golden(True, dtype=torch.float8_e4m3fn))


SIZES = ("size", "page_size", "num_layers")


def MHA(*sizes, **options):
    names = (*SIZES, "num_kv_heads", "head_dim")
    return cpattn.kv.MHATokenToKVPool(**dict(zip(names, sizes, strict=True)), **options)


def MLA(*sizes, **options):
    names = (*SIZES, "kv_lora_rank", "qk_rope_head_dim")
    return cpattn.kv.MLATokenToKVPool(**dict(zip(names, sizes, strict=True)), **options)


POOL = MHA(24, 8, 2, 2, 8, start_layer=3, v_head_dim=4)
LATENT = MLA(24, 8, 2, 8, 4, start_layer=3)
K, V = torch.ones(2, 2, 8), torch.ones(2, 2, 4)
ROWS = POOL.get_key_buffer(3)[1, :2]
NAMES = "must be 'torch', 'numpy' or None, got"
LAYER = "layer_id must be in [3, 5), got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MHA(-1, 8, 2, 2, 8), "size must be >= 0, got -1"),
        (lambda: MHA(8, 0, 2, 2, 8), "page_size must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, 2, 8, start_layer=-1), "start_layer must be >= 0, got -1"),
        (lambda: MHA(8, 8, 0, 2, 8), "num_layers must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, 2, 0), "head_dim must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, -2, -8), "num_kv_heads must be >= 1, got -2"),
        (lambda: MHA(8, 8, 2, 2, 8, v_head_dim=0), "v_head_dim must be >= 1, got 0"),
        (lambda: MLA(8, 8, 2, 0, 64), "kv_lora_rank must be >= 1, got 0"),
        (lambda: MLA(8, 8, 2, 512, -1), "qk_rope_head_dim must be >= 1, got -1"),
        (lambda: MLA(8, 8, 2, 512, 64, index_head_dim=0), "index_head_dim must be >= 1, got 0"),
        (lambda: MLA(8, 8, 2, 2, 8, dtype=np.float64), "dtype must be .* got 'float64'"),
        (lambda: MHA(8, 8, 2, 2, 8, container="jax"), f"container {NAMES} 'jax'"),
        (lambda: MHA(8, 2**63, 2, 2, 8), "page_size must fit into int64"),
        (lambda: MHA(8, 8, 2, 2**62, 2**9), "elements of a row must fit into int64"),
        (lambda: MHA(1 << 60, 128, 60, 8, 128), r"a buffer must be below 2\^63 bytes"),
    ],
)
def test_sizes(make, message):
    with pytest.raises(ValueError, match=f"^M[HL]ATokenToKVPool: {message}"):
        make()


def test_more_memory_than_the_system_has():
    with pytest.raises(MemoryError, match=r"^MHATokenToKVPool: the system has no \d+ bytes"):
        MHA(8, 8, 2**40, 2, 2**10)


@pytest.mark.parametrize("pool", [POOL, LATENT], ids=["mha", "mla"])
def test_a_pool_stays_where_it_is(pool):
    message = "a pool cannot be pickled or copied, for it is memory of this process"
    for move in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=f"^{type(pool).__name__}: {message}"):
            move(pool)


def write(loc, k, v, *scales, pool=POOL, **options):
    return lambda: pool.set_kv_buffer(3, loc, k, v, *scales, **options)


def latents(loc, k, v=None):
    return write(loc, k, v, pool=LATENT)


LIKE_V = V.transpose(1, 2).contiguous().transpose(1, 2)
SET = [
    (lambda: POOL.set_kv_buffer(5, [1, 2], K, V), LAYER + "5"),
    (write([1, 2], K, V, layer_id_override=0), LAYER + "0"),
    (write([1, 32], K, V), "loc must be in [-1, 32), got 32 at index 1"),
    (write(np.array([1, -2]), K, V), "loc must be in [-1, 32), got -2 at index 1"),
    (write([1, 2, 3], K, V), "k must have 3 * 16 = 48 elements, a row per slot, got 32 in shape ["),
    (write([1, 2], K, K), "v must have 2 * 8 = 16 elements, a row per slot, got 32 in shape"),
    (write([], K, V), "k must have 0 * 16 = 0 elements"),
    (write([1, 2], K.double(), V), "k must be float32, float16 or bfloat16, got float64"),
    (write([1, 2], K.to(torch.float8_e4m3fn), V), "k must be float32, float16 or bfloat16, got fl"),
    (write([1, 2], K, LIKE_V), "v must be contiguous in its last dimension"),
    (write([1, 2], K, V, None, 0), "v_scale must be a positive number, got 0"),
    (write([1, 2], K, V, float("nan")), "k_scale must be a positive number, got nan"),
    (write([1, 2], ROWS, V.bfloat16()), "the layer's k must not overlap k in memory"),
    (
        latents([1, 2], torch.ones(2, 8), LATENT.get_key_buffer(3)[1, :1]),
        "the layer's k must not ov",
    ),
    (latents([1, 2], torch.ones(2, 11)), "the last dimension of k must be 8 + 4 = 12, got shape ["),
    (latents([1], torch.ones(2, 12)), "k must have 1 * 8 = 8 elements, a row per slot, got 16"),
]
OTHERS = [
    (lambda: POOL.get_key_buffer(2), f"get_key_buffer: {LAYER}2"),
    (lambda: POOL.get_value_buffer(5), f"get_value_buffer: {LAYER}5"),
    (lambda: POOL.get_kv_buffer(-1), f"get_key_buffer: {LAYER}-1"),
    (lambda: LATENT.get_index_k_buffer(5), f"get_index_k_buffer: {LAYER}5"),
    (lambda: LATENT.get_index_k_buffer(4), "get_index_k_buffer: the pool has no index_k"),
    (lambda: LATENT.set_index_k_buffer(4, [1], K), "set_index_k_buffer: the pool has no index_k"),
]


@pytest.mark.parametrize(
    ("call", "message"), [*((call, f"set_kv_buffer: {rule}") for call, rule in SET), *OTHERS]
)
def test_calls(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
    assert not any(x.any() for x in (POOL.k_buffer, POOL.v_buffer, LATENT.k_buffer))
