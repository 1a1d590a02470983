# SPDX-License-Identifier: Apache-2.0
"""Layers of the vLLM backend whose KV cache is of FP8, against the oracle and vLLM's own kernels.

Those cut numbers off to codes, where cpattn rounds them: the same rows are mostly other codes.
Rows of numbers that are codes already, times a power of two, are the same codes in both.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from support.cases import DTYPES, assert_attention

with warnings.catch_warnings():  # of what vLLM imports
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.attention.backends import cpu_attn

    from cpattn import reference
    from cpattn.integrations.vllm import backend
    from support.vllm.vllm_layers import (
        BLOCK,
        DIM,
        KV_HEADS,
        KV_LENS,
        NUM_BLOCKS,
        Batch,
        attributes,
        make_layer,
        make_metadata,
        make_stock_metadata,
        prepare,
        run,
    )

pytestmark = pytest.mark.engine("vllm-cpu")

TYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = [(1.0, 1.0), (0.013, 0.37)]
NAN = 0x7F  # in both types


@pytest.fixture(autouse=True)
def config(monkeypatch):
    return prepare(monkeypatch)


def make_cache():
    """Every other block of a larger tensor, all of it NaN, as a cache of vLLM is: bytes."""
    shape = (NUM_BLOCKS, 2, KV_HEADS, BLOCK, 2 * DIM)
    return torch.full(shape, NAN, dtype=torch.uint8)[:, 1]


def planes(cache, code):
    """Its keys and values."""
    return cache.view(NUM_BLOCKS, KV_HEADS, 2, BLOCK, DIM).view(code).unbind(2)


def quantized(x, scale, code):
    """The codes nearest to x / scale."""
    most = torch.finfo(code).max
    x = x.float() / scale
    codes = x.clamp(-most, most).to(code)
    if code == torch.float8_e5m2:
        codes = torch.where(x.isinf(), x, codes.float()).to(code)
    return codes


def meant(rows, scale, code):
    return quantized(rows, scale, code).double() * scale


def change(batch, of_keys, of_values):
    """Replace keys and values, of the step and before it."""
    batch.key, batch.value = of_keys(batch.key), of_values(batch.value)
    batch.prefixes = [(of_keys(key), of_values(value)) for key, value in batch.prefixes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_a_batch_of_all_kinds(name, scales, dtype):
    layer, batch, code = make_layer(kv_cache_dtype=name), Batch(dtype), TYPES[name]
    assert not layer.is_stock
    out = run(layer, batch, make_metadata(), make_cache(), attributes(*scales))
    inputs = batch.oracle_inputs()
    for cache, scale in zip(("k_cache", "v_cache"), scales, strict=True):
        inputs[cache] = meant(inputs[cache], scale, code)
    assert_attention(out, None, inputs)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_windows_softcap_and_sinks_are_as_on_other_caches(name):
    options = {"sliding_window": 20, "logits_soft_cap": 2.0, "sinks": torch.randn(4)}
    layer, batch = make_layer(kv_cache_dtype=name, **options), Batch("float32")
    out = run(layer, batch, make_metadata(), make_cache(), attributes(0.02, 0.03))
    inputs = batch.oracle_inputs(window=19, softcap=2.0, sinks=options["sinks"])
    for cache, scale in (("k_cache", 0.02), ("v_cache", 0.03)):
        inputs[cache] = meant(inputs[cache], scale, TYPES[name])
    assert_attention(out, None, inputs)


@pytest.mark.parametrize("offset", [0, 3])  # 3: rows that do not start at whole words
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_rows_become_the_nearest_codes(name, scales, offset):
    """Too large ones the largest; NaN and the infinities of e5m2 are kept; -1 is no slot."""
    code, cache = TYPES[name], make_cache()
    fused = torch.randn(4, 2 * KV_HEADS * DIM + offset).bfloat16()[:, offset:]
    fused[0, :6] = torch.tensor([1e9, -1e9, math.inf, -math.inf, math.nan, 1e-30])
    key, value = (x.unflatten(1, (-1, DIM)) for x in fused.chunk(2, dim=1))
    layer = make_layer(kv_cache_dtype=name)
    layer.do_kv_cache_update(attributes(*scales), key, value, cache, torch.tensor([33, -1, 0, -1]))
    for plane, rows, scale in zip(planes(cache, code), (key, value), scales, strict=True):
        for page, slot, row in ((1, 1, 0), (0, 0, 2)):
            stored, expected = plane[page, :, slot], quantized(rows[row], scale, code)
            np.testing.assert_array_equal(stored.float(), expected.float())
    most = torch.finfo(code).max
    limit = math.inf if name == "fp8_e5m2" else most
    first = planes(cache, code)[0][1, 0, 1, :5].float().numpy()
    np.testing.assert_array_equal(first, [most, -most, limit, -limit, math.nan])
    for plane in planes(cache, torch.uint8):
        plane[1, :, 1] = plane[0, :, 0] = NAN
    assert (cache == NAN).all()  # elsewhere


def test_padding_is_neither_written_nor_read():
    layer, batch, cache = make_layer(kv_cache_dtype="fp8"), Batch("float32", pad=5), make_cache()
    out = run(layer, batch, make_metadata(), cache)
    assert (out[-5:] == 7).all()
    assert (cache != NAN).sum() == 2 * sum(KV_LENS) * KV_HEADS * DIM


def test_a_cache_that_starts_anywhere_is_written_in_place():
    layer, batch = make_layer(kv_cache_dtype="fp8"), Batch("float32")
    results = []
    for offset in (16, 3):
        memory = torch.full((offset + NUM_BLOCKS * KV_HEADS * BLOCK * 2 * DIM,), NAN).byte()
        cache = memory[offset:].view(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
        results.append(run(layer, batch, make_metadata(), cache))
    assert torch.equal(*results)


def test_other_caches_have_no_scales():
    batch = Batch("bfloat16")
    layers = [attributes(), attributes(-1.0, 3.0)]
    caches = [torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * DIM).bfloat16() for _ in layers]
    sides = zip(caches, layers, strict=True)
    results = [run(make_layer(), batch, make_metadata(), *side) for side in sides]
    assert torch.equal(*results)


def of_both(batch, name, scales=(1.0, 1.0)):
    """A layer of cpattn, and one of vLLM."""
    dtype = str(batch.query.dtype).removeprefix("torch.")
    sides = (
        (backend.CpattnImpl, make_metadata()),
        (cpu_attn.CPUAttentionBackendImpl, make_stock_metadata(dtype, name)),
    )
    for impl, metadata in sides:
        layer = make_layer(impl, kv_cache_dtype=name)
        yield run(layer, batch, metadata, make_cache().zero_(), attributes(*scales))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.125)], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_on_the_same_codes_vllm_gives_the_same(name, scales):
    """Both against the oracle, in float32."""
    batch, code = Batch("float32"), TYPES[name]
    change(batch, *(lambda x, s=scale: meant(x, s, code).float() for scale in scales))
    for out in of_both(batch, name, scales):
        assert_attention(out, None, batch.oracle_inputs())


@pytest.mark.parametrize("name", TYPES)
def test_codes_are_nearer_to_what_was_given_than_those_of_vllm(name):
    batch = Batch("float32")
    exact, _ = reference.paged_attention(**batch.oracle_inputs())
    ours, stock = (np.abs(out.double().numpy() - exact).mean() for out in of_both(batch, name))
    assert ours < stock / 1.5
