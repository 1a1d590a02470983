# SPDX-License-Identifier: Apache-2.0
"""The core writes no result over an argument that it still reads, nor over another result.

`cpattn` makes most results itself; here they are handed to the core, all parts of one block of
memory in turn.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import cpattn
from cpattn import _core
from support.tolerances import EPS, TOLERANCES

MEMORY = torch.zeros(1 << 16, dtype=torch.uint8)


def part(*shape, dtype=torch.float32, at=0):
    """A tensor in the block of memory, from byte `at` on."""
    size = int(np.prod(shape)) * dtype.itemsize
    return MEMORY[at : at + size].view(dtype).view(shape)


def own(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


I32, I64, BF16, U8 = torch.int32, torch.int64, torch.bfloat16, torch.uint8
E4M3 = torch.float8_e4m3fn


def sparse_flash(**shared):
    tensors = {
        "query": own(1, 2, 4, 32),
        "key": own(1, 8, 1, 32),
        "value": own(1, 8, 1, 32),
        "sparse_indices": own(1, 2, 1, 4, dtype=I32),
        "query_rope": own(1, 2, 4, 16),
        "key_rope": own(1, 8, 1, 16),
        "out": own(1, 2, 4, 32),
        "softmax_max": own(1, 2, 4),
        "softmax_sum": own(1, 2, 4),
        **shared,
    }
    return lambda: _core.npu_sparse_flash_attention(
        **tensors, scale_value=1.0, block_table=None, actual_seq_lengths_query=None,
        actual_seq_lengths_kv=None, sparse_block_size=1, layout_query="BSND", layout_kv="BSND",
        sparse_mode=0, pre_tokens=2**63 - 1, next_tokens=2**63 - 1, attention_mode=2,
    )  # fmt: skip


def split_norm(**shared):
    tensors = {"x": own(2, 40), "q": own(2, 16), "k_nope": own(2, 1, 16), "k_pe": own(2, 1, 8)}
    tensors |= {"latent": own(2, 1, 24)} | shared
    x = tensors.pop("x")
    weights = own(16), own(16), None, None
    return lambda: _core.split_qk_norm(x, *weights, 16, 16, 8, 1e-6, 1e-6, **tensors)


def indexer(function, name, dtype, **shared):
    tensors = {
        "q": own(2, 4, 32),
        "k": own(8, 32),
        "weights": own(2, 4),
        "out": own(2, 8, dtype=dtype),
    }
    tensors |= {"k_scale": None} | shared
    options = {"sorted": True} if name == "indices" else {}
    return lambda: function(**tensors, ks=[0, 0], ke=[8, 8], **options)


def topk(**shared):
    tensors = {"score": own(2, 8), "out": own(2, 4, dtype=I32), **shared}
    return lambda: _core.fast_topk(tensors["score"], [8, 8], 4, None, True, tensors["out"])


def topk_slots(**shared):
    tensors = {"page_table": own(2, 8, dtype=I32), "out": own(2, 4, dtype=I32), **shared}
    return lambda: _core.fast_topk_transform_fused(
        own(2, 8), [8, 8], tensors["page_table"], None, 1, 4, None, True, tensors["out"]
    )


def slots(**shared):
    names = {"page_table": own(2, 8, dtype=I32), "topk_indices": own(2, 4, dtype=I32)}
    tensors = names | {"out": own(2, 4, dtype=I32)} | shared
    return lambda: _core.transform_index_page_table_decode(
        tensors["page_table"], tensors["topk_indices"], 1, tensors["out"]
    )


def sparse_mla(**shared):
    tensors = {"q": own(2, 4, 32), "kv": own(8, 1, 32), "indices": own(2, 4, dtype=I32)}
    tensors |= {"out": own(2, 4, 32), "max_logits": own(2, 4), "lse": own(2, 4)} | shared
    options = {"sm_scale": 1.0, "d_v": 32, "attn_sink": None, "topk_length": None}
    return lambda: _core.flash_mla_sparse_fwd(**tensors, **options, num_threads=None)


def read_cache(**shared):
    tensors = {"cache": own(1, 132, dtype=U8), "codes": own(1, 128, dtype=E4M3), "scale": own(1)}
    tensors |= shared
    return lambda: _core.read_index_k_cache(slots=[0], **tensors)


def quantize(**shared):
    tensors = {"x": own(2, 128), "codes": own(2, 128, dtype=E4M3), "scale": own(2, 1), **shared}
    return lambda: _core.quantize_index(power_of_two=False, **tensors)


def hadamard(**shared):
    return lambda: _core.hadamard_transform(
        **{"x": own(2, 8), "out": own(2, 8)} | shared, scale=1.0
    )


CALLS = [
    (hadamard, {"x": part(2, 8), "out": part(2, 8)}),
    (quantize, {"x": part(2, 128), "codes": part(2, 128, dtype=E4M3)}),
    (quantize, {"x": part(2, 128), "scale": part(2, 1)}),
    (quantize, {"codes": part(2, 128, dtype=E4M3), "scale": part(2, 1)}),
    (read_cache, {"cache": part(1, 132, dtype=U8), "codes": part(1, 128, dtype=E4M3)}),
    (read_cache, {"cache": part(1, 132, dtype=U8), "scale": part(1, at=128)}),
    (split_norm, {"x": part(2, 40), "q": part(2, 16)}),
    (split_norm, {"x": part(2, 40), "latent": part(2, 1, 24, at=64)}),
    (split_norm, {"k_pe": part(2, 1, 8), "k_nope": part(2, 1, 16)}),
    (topk, {"score": part(2, 8), "out": part(2, 4, dtype=I32)}),
    (topk_slots, {"page_table": part(2, 8, dtype=I32), "out": part(2, 4, dtype=I32)}),
    (slots, {"page_table": part(2, 8, dtype=I64), "out": part(2, 4, dtype=I32, at=100)}),
    (slots, {"topk_indices": part(2, 4, dtype=I32), "out": part(2, 4, dtype=I32)}),
    *(
        (partial_call, {name: tensor, "out": part(2, 8, dtype=dtype)})
        for function, kind, dtype in (
            (_core.indexer_logits, "logits", torch.float32),
            (_core.indexer_topk, "indices", I32),
        )
        for partial_call in [
            lambda function=function, kind=kind, dtype=dtype, **shared: indexer(
                function, kind, dtype, **shared
            )
        ]
        for name, tensor in (
            ("q", part(2, 4, 32)),
            ("k", part(8, 32)),
            ("weights", part(2, 4)),
            ("k_scale", part(8)),
        )
    ),
    *(
        (sparse_mla, {name: tensor, result: part(*shape)})
        for result, shape in (("out", (2, 4, 32)), ("lse", (2, 4)), ("max_logits", (2, 4)))
        for name, tensor in (
            ("q", part(2, 4, 32)),
            ("kv", part(8, 1, 32)),
            ("indices", part(2, 4, dtype=I32)),
        )
    ),
    (sparse_mla, {"lse": part(2, 4), "max_logits": part(2, 4)}),
    *(
        (sparse_flash, {name: tensor, result: part(*shape)})
        for result, shape in (("out", (1, 2, 4, 32)), ("softmax_sum", (1, 2, 4)))
        for name, tensor in (
            ("query", part(1, 2, 4, 32)),
            ("key", part(1, 8, 1, 32)),
            ("value", part(1, 8, 1, 32)),
            ("sparse_indices", part(1, 2, 1, 4, dtype=I32)),
            ("query_rope", part(1, 2, 4, 16)),
            ("key_rope", part(1, 8, 1, 16)),
        )
    ),
    (sparse_flash, {"softmax_max": part(1, 2, 4), "softmax_sum": part(1, 2, 4)}),
    (sparse_flash, {"out": part(1, 2, 4, 32), "softmax_sum": part(1, 2, 4)}),
]


def name_of(value):
    if isinstance(value, dict):
        return "-".join(value)
    return getattr(value, "__name__", "indexer").replace("<lambda>", "indexer")


@pytest.mark.parametrize(("call", "shared"), CALLS, ids=name_of)
def test_memory_is_shared_by_nothing_that_is_written(call, shared):
    before = MEMORY.clone()
    call()()  # right without
    with pytest.raises(ValueError, match="must not overlap"):
        call(**shared)()
    assert torch.equal(MEMORY, before)


def test_indices_that_change_during_the_call_read_no_other_memory():
    """They are read once: what was checked is what is used."""
    indices = torch.zeros(64, 512, dtype=torch.int32)
    q, kv = torch.ones(64, 16, 32), torch.ones(16, 1, 32)
    stop = threading.Event()

    def change():
        while not stop.is_set():
            indices.fill_(2**30)
            indices.fill_(3)

    rounding = TOLERANCES["attention", "float32"] * EPS["float32"]
    thread = threading.Thread(target=change)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            out, _, _ = cpattn.sparse.flash_mla_sparse_fwd(q, kv, indices, 0.1, d_v=32)
            assert torch.all((out == 0) | ((out - 1).abs() <= rounding))  # of ones
    finally:
        stop.set()
        thread.join()
