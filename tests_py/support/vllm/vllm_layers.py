# SPDX-License-Identifier: Apache-2.0
"""Layers of the vLLM backend without an engine, and a batch of all kinds to give them."""

from types import SimpleNamespace

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from cpattn.integrations.vllm import backend
from support.cases import one_after_another

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 32
# A chunk of a prompt behind a cached prefix, a whole prompt, and three decoded tokens.
Q_LENS, KV_LENS = [40, 70, 1, 1, 1], [100, 70, 64, 33, 1]
BLOCKS = [[9, 2, 14, 5], [1, 12, 7], [4, 10], [13, 3], [8]]
NUM_BLOCKS = 16


def prepare(monkeypatch):
    """Prepare an engine's configuration, which is returned, and its kernels for layers."""
    torch.manual_seed(0)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32), kv_transfer_config=None
    )
    for module in (cpu_attn, backend):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    current_platform.import_kernels()
    return config


def attributes(k_scale=1.0, v_scale=1.0):
    """Return the attributes of the layer that vLLM's kernels read."""
    return SimpleNamespace(isa="vec", _k_scale_float=k_scale, _v_scale_float=v_scale)


LAYER = attributes()


def make_layer(impl=backend.CpattnImpl, **options):
    """Make a layer with arguments by position and by name, as in vLLM."""
    given = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **options}
    return impl(HEADS, DIM, DIM**-0.5, KV_HEADS, **given)


def make_cache(dtype="float32", shape=(KV_HEADS, BLOCK, 2 * DIM)):
    """Make a cache from every other block of a larger tensor; unwritten places are NaN."""
    return torch.full((NUM_BLOCKS, 2, *shape), torch.nan, dtype=getattr(torch, dtype))[:, 1]


def slots(sequence, first, last):
    positions = np.arange(first, last)
    blocks = np.array(BLOCKS[sequence])[positions // BLOCK]
    return torch.from_numpy(blocks * BLOCK + positions % BLOCK)


def make_metadata(**options):
    tables = np.full((len(BLOCKS), 6), NUM_BLOCKS + 99, np.int32)  # vLLM's have spare columns
    for row, blocks in zip(tables, BLOCKS, strict=True):
        row[: len(blocks)] = blocks
    pairs = enumerate(zip(Q_LENS, KV_LENS, strict=True))
    return backend.CpattnMetadata(
        num_actual_tokens=sum(Q_LENS),
        max_query_len=max(Q_LENS),
        query_start_loc=torch.tensor([0, *np.cumsum(Q_LENS)], dtype=torch.int32),
        max_seq_len=max(KV_LENS),
        seq_lens=torch.tensor(KV_LENS, dtype=torch.int32),
        block_table=torch.from_numpy(tables),
        slot_mapping=torch.cat([slots(i, kv - q, kv) for i, (q, kv) in pairs]),
        scheduler_metadata=None,
        **options,
    )


def make_stock_metadata(kv_cache_dtype="auto", causal=True):
    metadata = make_metadata(causal=causal)
    metadata.scheduler_metadata = cpu_attn.ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(Q_LENS), num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
        seq_lens=metadata.seq_lens, dtype=torch.float32,
        query_start_loc=metadata.query_start_loc, causal=causal, sliding_window_size=-1,
        isa=LAYER.isa, enable_kv_split=True, kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    return metadata


class Batch:
    def __init__(self, dtype, pad=0):
        rows, width = sum(Q_LENS) + pad, (HEADS + 2 * KV_HEADS) * DIM
        fused = torch.randn(rows, width).to(getattr(torch, dtype))  # models project them together
        parts = fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        self.query, self.key, self.value = (x.unflatten(1, (-1, DIM)) for x in parts)
        self.prefixes = [
            torch.randn(2, kv - q, KV_HEADS, DIM).to(fused.dtype)
            for q, kv in zip(Q_LENS, KV_LENS, strict=True)
        ]

    def oracle_inputs(self, **options):
        ends = np.cumsum([0, *Q_LENS])
        keys, values = [], []
        for i, (prefix_k, prefix_v) in enumerate(self.prefixes):
            keys += [prefix_k, self.key[ends[i] : ends[i + 1]]]
            values += [prefix_v, self.value[ends[i] : ends[i + 1]]]
        q, k, v = self.query[: ends[-1]], torch.cat(keys), torch.cat(values)
        return one_after_another(q, k, v, Q_LENS, KV_LENS, **options)


def run(layer, batch, metadata, cache, attributes=LAYER):
    """Run a layer as vLLM does: earlier steps, then this one."""
    for i, (key, value) in enumerate(batch.prefixes):
        layer.do_kv_cache_update(attributes, key, value, cache, slots(i, 0, len(key)))
    layer.do_kv_cache_update(attributes, batch.key, batch.value, cache, metadata.slot_mapping)
    out = torch.full_like(batch.query, 7, memory_format=torch.contiguous_format)
    result = layer.forward(attributes, batch.query, batch.key, batch.value, cache, metadata, out)
    assert result is out
    return out
