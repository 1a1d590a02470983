# SPDX-License-Identifier: Apache-2.0
"""Keys and values stored as 8-bit codes give what the oracle gives on their numbers."""

import functools
import itertools
import math

import pytest
import torch

import cpattn
from cpattn.integrations import flash_attn, flashinfer
from support.attention_cases import plan_of, run
from support.cases import DTYPES, Case, assert_attention, expected_attention, make_inputs
from support.pairwise import pairwise

CODES = {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "int8")}
SCALES = ("one", "tensor", "heads", "tokens")
DECODE = Case(q_lens=(1, 3, 0), kv_lens=(1200, 70, 5), num_heads=8, num_kv_heads=2, page_size=64)
CASES = [
    DECODE,
    DECODE.with_(kv_layout="HND", page_size=100),
    DECODE.with_(kv_layout="3-D", page_size=16, num_heads=6, num_kv_heads=3, head_dim=80),
    DECODE.with_(num_heads=2, num_kv_heads=1, head_dim=576, v_head_dim=512, options={"scale": 0.1}),
    DECODE.with_(head_dim=20, v_head_dim=72),
    DECODE.with_(q_lens=(5, 1, 2), options={"window": 520, "softcap": 5.0}),
    DECODE.with_(q_lens=(14, 3, 2), num_heads=4),  # 28 rows: split, but not read in place
    Case(q_lens=(130, 3), kv_lens=(700, 40), num_heads=4, num_kv_heads=2, head_dim=48),
    Case(q_lens=(70,), kv_lens=(333,), num_kv_heads=1, head_dim=72, v_head_dim=40),
    Case(q_lens=(70,), kv_lens=(333,), page_size=1, options={"window": 50, "softcap": 3.0}),
    Case(q_lens=(33,), kv_lens=(90,), options={"causal": False, "sinks": torch.zeros(4)}),
]
UNITS = {"float8_e4m3fn": 0.3, "float8_e5m2": 0.3, "int8": 1 / 30}  # scales for numbers of size 1


def quantize(x, code, unit):
    x = x.float() / unit
    return x.round().clamp(-128, 127).to(torch.int8) if code == "int8" else x.to(CODES[code])


def scale_of(kind, cache, layout, seed, unit, dtype=torch.float32):
    """Return a scale of a cache, and its float64 factors in the axes of the cache."""
    generator = torch.Generator().manual_seed(seed)
    head_axis = 1 if layout == "HND" or cache.ndim == 3 else 2
    heads = cache.shape[head_axis]
    if kind == "one":
        return None, torch.ones(1)
    if kind == "tensor":
        return unit, torch.tensor(unit, dtype=torch.float64)
    if kind == "heads":
        scale = unit * (torch.rand(heads, generator=generator) + 0.5)
        shape = [1] * cache.ndim
        shape[head_axis] = heads
        return scale, scale.double().view(shape)
    scale = unit * (torch.rand(cache.shape[:-1], generator=generator) + 0.5)
    scale = scale.to(dtype)
    return scale, scale.double()[..., None]


def coded(inputs, code, kind, token_dtype=torch.float32):
    """Return the arguments with caches of codes, and with the numbers of codes in float64."""
    given, meant = dict(inputs), dict(inputs)
    for seed, name in enumerate(("k", "v")):
        unit = 1.0 if kind == "one" else UNITS[code]
        codes = quantize(inputs[f"{name}_cache"], code, unit)
        layout = inputs.get("kv_layout", "NHD")
        scale, factors = scale_of(kind, codes, layout, seed, unit, token_dtype)
        given[f"{name}_cache"] = codes
        given[f"{name}_scale"] = 1.0 if scale is None and code == "int8" else scale
        meant[f"{name}_cache"] = codes.double() * factors
    return given, meant


CODES_IN_DTYPES = list(itertools.product(CODES, DTYPES))
COMBINATIONS = pairwise(range(len(CASES)), CODES_IN_DTYPES, SCALES)


@functools.cache
def given_and_expected(index, code, dtype, kind, token_dtype=torch.float32):
    """Make inputs and results once for all instruction sets."""
    given, meant = coded(make_inputs(CASES[index].with_(dtype=dtype)), code, kind, token_dtype)
    return given, meant, expected_attention(meant)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_against_the_oracle(isa, index):
    """Every case is right with codes of each kind in each dtype, and with each kind of scale."""
    for which, (code, dtype), kind in COMBINATIONS:
        if which == index:
            given, meant, expected = given_and_expected(index, code, dtype, kind)
            assert_attention(*run(given), meant, "attention", expected, kind == "tokens")


@pytest.mark.parametrize("token_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_scales_of_tokens_in_16_bits(isa, code, token_dtype):
    for index in (0, 6):
        given, meant, expected = given_and_expected(index, code, "float32", "tokens", token_dtype)
        assert_attention(*run(given), meant, expected=expected, rounds_values=True)


@pytest.mark.parametrize("code", CODES)
def test_bytes_with_their_type_named(code):
    given, _ = coded(make_inputs(CASES[0]), code, "tensor")
    wanted = run(given)
    given |= {name: given[name].view(torch.uint8) for name in ("k_cache", "v_cache")}
    assert all(map(torch.equal, run(given, kv_dtype=code), wanted))


@pytest.mark.parametrize("kind", SCALES)
def test_results_do_not_depend_on_threads(kind):
    for case in (CASES[0], CASES[6]):
        given, _ = coded(make_inputs(case), "int8", kind)
        assert all(map(torch.equal, run(given, num_threads=5), run(given, num_threads=1)))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(isa, dtype, kind):
    case = Case(q_lens=(150,), kv_lens=(700,), num_heads=6, num_kv_heads=2, dtype=dtype)
    given, _ = coded(make_inputs(case), "float8_e4m3fn", kind)
    whole = run(given, batch_invariant=True)
    for first, last in [(0, 1), (10, 75), (149, 150)]:
        part = given | {"q": given["q"][first:last], "q_lens": [last - first]}
        part["kv_lens"] = [550 + last]
        for result, expected in zip(run(part, batch_invariant=True), whole, strict=True):
            assert torch.equal(result, expected[first:last])


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("code", CODES)
def test_what_is_not_seen_does_not_matter(isa, code, q_len):
    """Unread places have NaN and the largest of all codes and scales."""
    case = Case(q_lens=(q_len,), kv_lens=(300,), page_size=16, options={"window": 70})
    given, _ = coded(make_inputs(case), code, "tokens")
    wanted = run(given)
    pages = given["block_tables"][0]
    for position in [*range(300 - q_len - 70), *range(300, 304)]:
        page, slot = int(pages[position // 16]), position % 16
        for name in ("k", "v"):
            given[f"{name}_cache"].view(torch.uint8)[page, slot] = 0x7F
            given[f"{name}_scale"][page, slot] = math.nan
    assert all(map(torch.equal, run(given), wanted))


@pytest.mark.parametrize("q_len", [1, 40])
def test_nan_is_not_lost(isa, q_len):
    case = Case(q_lens=(q_len,), kv_lens=(100,), num_heads=2, num_kv_heads=1)
    for code, name in itertools.product(("float8_e4m3fn", "float8_e5m2"), ("k", "v")):
        given, _ = coded(make_inputs(case), code, "tensor")
        given[f"{name}_cache"].view(torch.uint8)[int(given["block_tables"][0][0]), 5, 0, 3] = 0x7F
        out, _ = run(given)
        assert out[:, :, 3].isnan().all()
    for name in ("k", "v"):
        given, _ = coded(make_inputs(case), "int8", "tokens")
        given[f"{name}_scale"][int(given["block_tables"][0][0]), 5] = math.nan
        assert run(given)[0].isnan().all()


def test_every_code_is_what_torch_says(isa):
    """The result for one key is the value itself, for each code."""
    for code, (q_len, dtype) in itertools.product(CODES, ((1, "float32"), (20, "float16"))):
        values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(CODES[code])
        cache = values.view(1, 1, 1, 256)
        keys = torch.zeros(1, 1, 1, 16, dtype=torch.uint8).view(CODES[code])
        q = torch.zeros(q_len, 1, 16, dtype=getattr(torch, dtype))
        out = cpattn.paged_attention(
            q, keys, cache, q_lens=[q_len], kv_lens=[1], block_tables=[[0]], causal=False,
            k_scale=1.0, v_scale=1.0,
        )  # fmt: skip
        finite = values.float().isfinite()
        assert torch.equal(out[0, 0][finite].float(), values.float()[finite])
        assert not out[0, 0][~finite].isfinite().any()


def test_scales_without_codes():
    """Scales per tensor and per head are factors of any cache."""
    inputs = make_inputs(DECODE.with_(dtype="bfloat16"))
    for kind in ("tensor", "heads"):
        given, meant = dict(inputs), dict(inputs)
        for seed, name in enumerate(("k", "v")):
            cache = inputs[f"{name}_cache"]
            given[f"{name}_scale"], factors = scale_of(kind, cache, "NHD", seed, 0.8)
            meant[f"{name}_cache"] = cache.double() * factors
        assert_attention(*run(given), meant)


def test_a_plan_runs_on_codes():
    given, _ = coded(make_inputs(DECODE), "int8", "tokens")
    tensors = (given[name] for name in ("q", "k_cache", "v_cache"))
    scales = {name: given[name] for name in ("k_scale", "v_scale")}
    result = cpattn.run_attention(plan_of(given), *tensors, **scales, return_lse=True)
    assert all(map(torch.equal, result, run(given)))


REFUSED = [
    ({"k_scale": None}, ValueError, "paged_attention: k_scale must be given for a cache of int8"),
    ({"v_scale": None}, ValueError, "paged_attention: v_scale must be given for a cache of int8"),
    ({"k_scale": -1.0}, ValueError, "paged_attention: k_scale must be a positive number, got -1"),
    ({"v_scale": math.nan}, ValueError, "v_scale must be a positive number, got nan"),
    ({"k_scale": torch.zeros(1)}, ValueError, "k_scale must be a positive number, got 0"),
    ({"k_scale": 1e-30, "scale": 1e-10}, ValueError, "scale \\* k_scale must be in "),
    ({"k_scale": "1"}, TypeError, "k_scale must be a tensor"),
    ({"v_scale": torch.ones(3)}, ValueError, r"v_scale must have shape \[2\], got \[3\]"),
    ({"k_scale": -torch.ones(2)}, ValueError, "k_scale must be a positive number, got -1"),
    ({"k_scale": torch.ones(2, 2, 2, 2)}, ValueError, "k_scale must be one number, "),
    ({"k_scale": torch.ones(9, 64, 2).double()}, ValueError, "k_scale must be float32, float16"),
    ({"k_scale": torch.ones(9, 63, 2)}, ValueError, "page_size 64 does not agree with k_scale"),
    ({"k_scale": torch.ones(3, 64, 2)}, ValueError, "k_scale must have a number for each of"),
    ({"k_scale": torch.ones(99, 64, 1)}, ValueError, "k_scale must have a number for each of"),
    ({"kv_dtype": "fp8"}, ValueError, "kv_dtype must be 'float8_e4m3fn', 'float8_e5m2' or 'int8'"),
    ({"kv_dtype": "float8_e5m2"}, ValueError, "k_cache must be float8_e5m2, as kv_dtype says"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refusals(options, error, message):
    given, _ = coded(make_inputs(DECODE), "int8", "one")
    with pytest.raises(error, match=message):
        cpattn.paged_attention(**given | options)


def of_flashinfer(q, k, v, **scales):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan([0, 2], [0, 1], [0], [2], 2, 1, 16, 2)
    return wrapper.run(q, (k, v), **scales)


def of_flash_attn(q, k, v, k_scale=None, v_scale=None):
    return flash_attn.flash_attn_func(q[None], k, v, k_descale=k_scale, v_descale=v_scale)


@pytest.mark.parametrize(
    ("face", "named"),
    [(of_flashinfer, "Wrapper.run: {}_scale"), (of_flash_attn, "flash_attn_func: {}_descale")],
)
def test_int8_needs_both_scales_in_other_faces(face, named):
    """Codes go up to 127 for numbers of size 1; without scales one key would get all weight."""
    q, k, v = torch.ones(2, 2, 16), *torch.ones(2, 1, 2, 1, 16, dtype=torch.int8)
    for missing, scale in (("k", {"v_scale": 0.1}), ("v", {"k_scale": 0.1}), ("k", {})):
        message = f"{named.format(missing)} must be given for a cache of int8"
        with pytest.raises(ValueError, match=message):
            face(q, k, v, **scale)


def test_caches_that_do_not_fit():
    given, _ = coded(make_inputs(DECODE), "int8", "one")
    other = given | {"v_cache": given["v_cache"].float().to(torch.float8_e5m2)}
    with pytest.raises(ValueError, match="v_cache must be int8 like k_cache, got float8_e5m2"):
        cpattn.paged_attention(**other)
    raw = given | {"k_cache": given["k_cache"].view(torch.uint8)}
    with pytest.raises(ValueError, match="k_cache of uint8 needs kv_dtype"):
        cpattn.paged_attention(**raw)
    inputs = make_inputs(DECODE)
    tokens = torch.ones(inputs["k_cache"].shape[:-1])
    with pytest.raises(ValueError, match="k_scale of each token is for caches of float8_e4m3fn"):
        cpattn.paged_attention(**inputs, k_scale=tokens)
