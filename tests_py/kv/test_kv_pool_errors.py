# SPDX-License-Identifier: Apache-2.0
"""Refusals of KV pools, in which words, and that nothing is written then."""

from __future__ import annotations

import copy
import pickle
import re

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
        (lambda: MHA(8, 8, 2, 2, 8, dtype="int4"), "dtype must be .* or int8, got 'int4'"),
        (lambda: MLA(8, 8, 2, 2, 8, dtype=np.float64), "dtype must be .* got 'float64'"),
        (lambda: MHA(8, 8, 2, 2, 8, container="jax"), f"container {NAMES} 'jax'"),
        (lambda: MHA(2**70, 8, 2, 2, 8), "size must fit into int64"),
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


def test_environment(monkeypatch):
    monkeypatch.setenv("ASCEND_USE_FIA", "maybe")
    with pytest.raises(ValueError, match=r"^MHATokenToKVPool: ASCEND_USE_FIA must .*'maybe'"):
        MHA(8, 8, 2, 2, 8)


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
    (lambda: LATENT.get_index_k_buffer(4), "get_index_k_buffer: the pool was made without"),
    (lambda: LATENT.set_index_k_buffer(4, [1], K), "set_index_k_buffer: the pool was made without"),
]


@pytest.mark.parametrize(
    ("call", "message"), [*((call, f"set_kv_buffer: {rule}") for call, rule in SET), *OTHERS]
)
def test_calls(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()
    assert not any(x.any() for x in (POOL.k_buffer, POOL.v_buffer, LATENT.k_buffer))
