# SPDX-License-Identifier: Apache-2.0
"""What KV pools refuse, in which words, and that nothing is written then."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch

import cpattn

SIZES = ("size", "page_size", "num_layers")


def MHA(*sizes, **options):
    names = (*SIZES, "num_kv_heads", "head_dim")
    return cpattn.kv.MHATokenToKVPool(**dict(zip(names, sizes, strict=True)), **options)


def MLA(*sizes, **options):
    names = (*SIZES, "kv_lora_rank", "qk_rope_head_dim")
    return cpattn.kv.MLATokenToKVPool(**dict(zip(names, sizes, strict=True)), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MHA(-1, 8, 2, 2, 8), r"MHATokenToKVPool: size must be >= 0, got -1"),
        (lambda: MHA(8, 0, 2, 2, 8), r"MHATokenToKVPool: page_size must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, 2, 8, start_layer=-1), r"MHATokenToKVPool: start_layer .* got -1"),
        (lambda: MHA(8, 8, 0, 2, 8), r"MHATokenToKVPool: num_layers must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, 2, 0), r"MHATokenToKVPool: head_dim must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, -2, -8), r"MHATokenToKVPool: num_kv_heads must be >= 1, got -2"),
        (lambda: MHA(8, 8, 2, 2, 8, v_head_dim=0), r"MHATokenToKVPool: v_head_dim must be >= 1"),
        (lambda: MLA(8, 8, 2, 0, 64), r"MLATokenToKVPool: kv_lora_rank must be >= 1, got 0"),
        (lambda: MLA(8, 8, 2, 512, -1), r"MLATokenToKVPool: qk_rope_head_dim .* got -1"),
        (lambda: MLA(8, 8, 2, 512, 64, index_head_dim=0),
         r"MLATokenToKVPool: index_head_dim must be >= 1, got 0"),
        (lambda: MHA(8, 8, 2, 2, 8, dtype="int4"),
         r"MHATokenToKVPool: dtype must be .* float8_e5m2 or int8, got 'int4'"),
        (lambda: MLA(8, 8, 2, 2, 8, dtype=np.float64), r"MLATokenToKVPool: .* got 'float64'"),
        (lambda: MLA(8, 8, 2, 2, 8, dtype=torch.int64), r"MLATokenToKVPool: .* got 'int64'"),
        (lambda: MHA(8, 8, 2, 2, 8, container="jax"),
         r"MHATokenToKVPool: container must be 'torch', 'numpy' or None, got 'jax'"),
    ],
)  # fmt: skip
def test_sizes(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("container", [1, np.zeros(3), torch.zeros(3), ["torch"]])
def test_a_container_that_is_no_name(container):
    message = r"^MHATokenToKVPool: container must be 'torch', 'numpy' or None, got \w+$"
    with pytest.raises(TypeError, match=message):
        MHA(8, 8, 2, 2, 8, container=container)


@pytest.mark.parametrize(
    "sizes", [(2**70, 8, 2, 2, 8), (8, 2**63, 2, 2, 8), (8, 8, 2**64, 2, 8), (8, 8, 2, 2**62, 2**9)]
)
def test_sizes_beyond_every_memory(sizes):
    with pytest.raises(ValueError, match=r"^MHATokenToKVPool: .* (fit into int64|below 2\^63)"):
        MHA(*sizes)
    with pytest.raises(MemoryError, match=r"^MHATokenToKVPool: the system has no .* bytes"):
        MHA(8, 8, 2**40, 2, 2**10)


@pytest.mark.parametrize("make", [lambda: POOL, lambda: LATENT])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pool_stays_where_it_is(make, protocol):
    name = type(make()).__name__
    message = f"^{name}: a pool cannot be pickled or copied, for it is memory of this process"
    for move in (partial(pickle.dumps, protocol=protocol), copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=message):
            move(make())


def test_environment(monkeypatch):
    monkeypatch.setenv("ASCEND_USE_FIA", "maybe")
    with pytest.raises(ValueError, match=r"^MHATokenToKVPool: ASCEND_USE_FIA must .*'maybe'"):
        MHA(8, 8, 2, 2, 8)


POOL = MHA(24, 8, 2, 2, 8, start_layer=3, v_head_dim=4)
LATENT = MLA(24, 8, 2, 8, 4, start_layer=3)
K, V = torch.ones(2, 2, 8), torch.ones(2, 2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: POOL.get_key_buffer(2), r"get_key_buffer: layer_id must be in \[3, 5\), got 2"),
        (lambda: POOL.get_value_buffer(5), r"get_value_buffer: layer_id must be in \[3, 5\), g"),
        (lambda: POOL.get_kv_buffer(-1), r"get_key_buffer: layer_id must be in \[3, 5\), got -1"),
        (lambda: LATENT.get_index_k_buffer(5), r"get_index_k_buffer: layer_id must be in"),
        (lambda: LATENT.get_index_k_buffer(4), r"get_index_k_buffer: the pool was made without"),
        (lambda: LATENT.set_index_k_buffer(4, [1], K), r"set_index_k_buffer: the pool was made"),
        (lambda: POOL.set_kv_buffer(5, [1, 2], K, V), r"set_kv_buffer: layer_id must be in \[3"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K, V, layer_id_override=0),
         r"set_kv_buffer: layer_id must be in \[3, 5\), got 0"),
        (lambda: POOL.set_kv_buffer(3, [1, 32], K, V),
         r"set_kv_buffer: loc must be in \[-1, 32\), got 32 at index 1"),
        (lambda: POOL.set_kv_buffer(3, np.array([1, -2]), K, V),
         r"set_kv_buffer: loc must be in \[-1, 32\), got -2 at index 1"),
        (lambda: POOL.set_kv_buffer(3, [1, 2, 3], K, V),
         r"set_kv_buffer: k must have 3 \* 16 = 48 elements, a row per slot, got 32 in shape "
         r"\[2, 2, 8\]"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K, K),
         r"set_kv_buffer: v must have 2 \* 8 = 16 elements, a row per slot, got 32 in shape"),
        (lambda: POOL.set_kv_buffer(3, [], K, V), r"set_kv_buffer: k must have 0 \* 16 = 0 elem"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K.double(), V),
         r"set_kv_buffer: k must be float32, float16 or bfloat16, got float64"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K.to(torch.float8_e4m3fn), V),
         r"set_kv_buffer: k must be float32, float16 or bfloat16, got float8_e4m3fn"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K, V.transpose(1, 2).contiguous().transpose(1, 2)),
         r"set_kv_buffer: v must be contiguous in its last dimension"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K, V, v_scale=0),
         r"set_kv_buffer: v_scale must be a positive number, got 0"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], K, V, k_scale=float("nan")),
         r"set_kv_buffer: k_scale must be a positive number, got nan"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], POOL.get_key_buffer(3)[1, :2], V.bfloat16()),
         r"set_kv_buffer: the layer's k must not overlap k in memory"),
        (lambda: LATENT.set_kv_buffer(3, [1, 2], torch.ones(2, 8), LATENT.get_key_buffer(3)[1, :1]),
         r"set_kv_buffer: the layer's k must not overlap v in memory"),
        (lambda: LATENT.set_kv_buffer(3, [1, 2], torch.ones(2, 11)),
         r"set_kv_buffer: the last dimension of k must be 8 \+ 4 = 12, got shape \[2, 11\]"),
        (lambda: LATENT.set_kv_buffer(3, [1], torch.ones(2, 12)),
         r"set_kv_buffer: k must have 1 \* 8 = 8 elements, a row per slot, got 16"),
    ],
)  # fmt: skip
def test_calls(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
    assert not POOL.k_buffer.any()
    assert not POOL.v_buffer.any()
    assert not LATENT.k_buffer.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: POOL.set_kv_buffer(3, [1.0, 2.0], K, V), "set_kv_buffer: loc must hold integers"),
        (lambda: POOL.set_kv_buffer(3, torch.ones(2), K, V), "set_kv_buffer: loc must be int32 or"),
        (lambda: POOL.set_kv_buffer(3, [1, 2], [1.0], V), "set_kv_buffer: k must be a tensor"),
        (lambda: POOL.get_key_buffer(3.0), "get_key_buffer: layer_id must be an integer, got flo"),
        (lambda: POOL.get_key_buffer(True), "get_key_buffer: layer_id must be an integer, got bo"),
        (lambda: POOL.set_kv_buffer("3", [1, 2], K, V), "set_kv_buffer: layer_id must be an int"),
        (
            lambda: POOL.set_kv_buffer(3, [1, 2], K, V, k_scale="x"),
            "set_kv_buffer: k_scale must be a number or a tensor, got str",
        ),
        (
            lambda: POOL.set_kv_buffer(3, [1, 2], K, V, v_scale=[1.0]),
            "set_kv_buffer: v_scale must be a number or a tensor, got list",
        ),
        (lambda: MHA(64.0, 8, 2, 2, 8), "MHATokenToKVPool: size must be an integer, got float"),
        (lambda: MHA(64, "8", 2, 2, 8), "MHATokenToKVPool: page_size must be an integer, got str"),
        (lambda: MHA(64, True, 2, 2, 8), "MHATokenToKVPool: page_size must be an integer, got bo"),
        (lambda: MHA(64, 8, None, 2, 8), "MHATokenToKVPool: num_layers must be an integer, got N"),
        (
            lambda: MHA(64, 8, 2, 2, 8, use_fia="yes"),
            "MHATokenToKVPool: use_fia must be a bool or None, got str",
        ),
        (lambda: MLA(64, 8, 2, 8, 4, use_fia=1), "MLATokenToKVPool: use_fia must be a bool or No"),
    ],
)
def test_types(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
