# SPDX-License-Identifier: Apache-2.0
"""Pools have the buffers of sglang's pools, and writes leave the same in them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import cpattn
from cpattn.transfer import sglang_0_5_23

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn"]


def make_pools(
    sglang: SimpleNamespace, rng: np.random.Generator, *, use_fia: bool
) -> tuple[Any, Any, str]:
    """Make one random pool twice: sglang's and ours."""
    common = {
        "size": int(rng.integers(1, 200)), "page_size": int(rng.choice([1, 8, 16, 128])),
        "start_layer": int(rng.integers(0, 9)),
    }  # fmt: skip
    num_layers, dtype = int(rng.integers(1, 5)), str(rng.choice(DTYPES))
    shared = {"layer_num": num_layers, "device": "cpu", "enable_memory_saver": False}
    theirs = common | shared | {"dtype": getattr(torch, dtype)}
    ours = common | {"num_layers": num_layers, "dtype": dtype, "use_fia": use_fia}
    if rng.random() < 0.5:
        heads, dims = int(rng.integers(1, 5)), int(rng.choice([8, 16]))
        widths = {"head_dim": dims, "v_head_dim": [None, 8, 24][rng.integers(3)]}
        upstream = sglang.npu_pools.NPUMHATokenToKVPool(head_num=heads, **widths, **theirs)
        return upstream, cpattn.kv.MHATokenToKVPool(num_kv_heads=heads, **widths, **ours), "mha"
    widths = {
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "index_head_dim": [None, 8][rng.integers(2)],
    }
    upstream = sglang.npu_pools.NPUMLATokenToKVPool(**widths, **theirs)
    return upstream, cpattn.kv.MLATokenToKVPool(**widths, **ours), "mla"


@pytest.fixture(params=["0", "1"])
def use_fia(request, monkeypatch) -> bool:
    monkeypatch.setenv("ASCEND_USE_FIA", request.param)
    return request.param == "1"


def layer_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_pool_buffers(sglang, rng, use_fia):
    for _ in range(60):
        upstream, pool, _ = make_pools(sglang, rng, use_fia=use_fia)
        ptrs, lens, item_lens = upstream.get_contiguous_buf_infos()
        our_ptrs, our_lens, our_item_lens = pool.get_contiguous_buf_infos()
        assert (our_lens, our_item_lens) == (lens, item_lens)
        for layer in range(pool.start_layer, pool.start_layer + pool.num_layers):
            for name in ("get_key_buffer", "get_value_buffer"):
                theirs, ours = getattr(upstream, name)(layer), getattr(pool, name)(layer)
                assert tuple(ours.shape) == tuple(theirs.shape)
                assert ours.dtype == theirs.dtype
        for i in range(0, len(ptrs), pool.num_layers):  # layers of a kind are one allocation
            kind, our_kind = ptrs[i : i + pool.num_layers], our_ptrs[i : i + pool.num_layers]
            assert [p - our_kind[0] for p in our_kind] == [p - kind[0] for p in kind]


def test_pool_writes(sglang, rng, use_fia):
    for _ in range(60):
        upstream, pool, kind = make_pools(sglang, rng, use_fia=use_fia)
        layer = pool.start_layer + int(rng.integers(pool.num_layers))
        num_slots = pool.num_pages * pool.page_size
        loc = torch.from_numpy(rng.permutation(num_slots)[: rng.integers(0, num_slots)])
        like_k, like_v = upstream.get_key_buffer(layer), upstream.get_value_buffer(layer)
        heads = upstream.head_num if kind == "mha" else 1
        k = torch.randn(len(loc), heads, like_k.shape[-1])
        v = torch.randn(len(loc), heads, like_v.shape[-1])
        scales = {"k_scale": 0.5, "v_scale": 1.7} if kind == "mha" and rng.random() < 0.5 else {}
        upstream.set_kv_buffer(SimpleNamespace(layer_id=layer), loc, k.clone(), v.clone(), **scales)
        pool.set_kv_buffer(layer, loc, k, v, **scales)
        if kind == "mla" and pool.index_k_buffer is not None:
            index_k = torch.randn(len(loc), 1, pool.index_k_buffer.shape[-1])
            upstream.set_index_k_buffer(layer, loc, index_k)
            pool.set_index_k_buffer(layer, loc, index_k)
            row = layer - pool.start_layer
            theirs = upstream.index_k_buffer[row]
            assert layer_bytes(pool.index_k_buffer[row]) == layer_bytes(theirs)
        for other in range(pool.start_layer, pool.start_layer + pool.num_layers):
            for get in ("get_key_buffer", "get_value_buffer"):
                ours, theirs = (getattr(x, get)(other) for x in (pool, upstream))
                assert layer_bytes(ours) == layer_bytes(theirs)


def test_setup_state_kv_args(sglang, rng):
    for _ in range(60):
        upstream, pool, _ = make_pools(sglang, rng, use_fia=False)
        draft_upstream, draft, _ = make_pools(sglang, rng, use_fia=False)
        with_draft, total = bool(rng.integers(2)), int(rng.integers(1, 62))
        theirs, ours = (sglang_0_5_23.KVArgs(), sglang_0_5_23.KVArgs())
        theirs.kv_data_ptrs = upstream.get_contiguous_buf_infos()[0]
        of_theirs = draft_upstream if with_draft else None
        sglang.disaggregation.setup_state_kv_args(theirs, upstream, of_theirs, total)
        sglang_0_5_23.setup_state_kv_args(ours, pool, draft if with_draft else None, total)
        assert hasattr(ours, "kv_buf_groups") == hasattr(theirs, "kv_buf_groups")
        for name in ("kv_buf_groups", "total_kv_layers", "hidden_kv_layers", "draft_kv_layers"):
            if hasattr(theirs, name):
                assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("state_types", "state_data_ptrs", "state_data_lens", "state_item_lens"):
            assert getattr(ours, name) == getattr(theirs, name) == []
