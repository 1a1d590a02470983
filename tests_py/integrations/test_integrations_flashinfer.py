# SPDX-License-Identifier: Apache-2.0
"""Functions with FlashInfer's names: plans, caches in one or two tensors, base-2 LSE, oracle."""

import itertools
import math

import numpy as np
import pytest
import torch

import cpattn
from cpattn.integrations import flashinfer
from cpattn.integrations.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
)
from cpattn.integrations.flashinfer._alibi import slopes_of
from support.cases import DTYPES, Case, assert_attention, make_inputs
from support.integrations import documented_masks
from support.tolerances import assert_similar

LN2 = math.log(2)
CASE = Case(q_lens=(5, 0, 3, 9), kv_lens=(37, 4, 16, 2), page_size=8)


def csr(case, tables):
    kv_lens = torch.tensor(case.kv_lens)
    counts = -(-kv_lens // case.page_size)
    indices = torch.cat([torch.tensor(row[:n]) for row, n in zip(tables, counts, strict=True)])
    last = kv_lens - (counts - 1).clamp(min=0) * case.page_size
    return torch.tensor([0, *counts]).cumsum(0).int(), indices.int(), last.int()


def plan_prefill(case, inputs, **options):
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0), inputs["kv_layout"])
    heads = case.num_heads, case.num_kv_heads, case.head_dim, case.page_size
    ends = torch.tensor([0, *case.q_lens]).cumsum(0).int()
    wrapper.plan(ends, *csr(case, inputs["block_tables"]), *heads, **options)
    return wrapper, (inputs["k_cache"], inputs["v_cache"])


def documented(case, inputs, causal, window_left=-1, custom_mask=True):
    """Return arguments of the oracle, in which only a mask decides, not options of the case."""
    mask = documented_masks.mask_of(
        documented_masks.flashinfer, case.q_lens, case.kv_lens, causal, window_left
    )
    rest = {name: value for name, value in inputs.items() if name not in ("causal", "window")}
    return {**rest, "causal": False, "custom_mask": mask & custom_mask}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(kv_layout, causal, dtype):
    case = CASE.with_(kv_layout=kv_layout, dtype=dtype, options={"causal": causal})
    inputs = make_inputs(case)
    wrapper, cache = plan_prefill(case, inputs, causal=causal)
    out, lse = wrapper.run(inputs["q"], cache, return_lse=True)
    assert_attention(out, lse * LN2, documented(case, inputs, causal))
    assert torch.equal(wrapper.run(inputs["q"], cache), out)  # a second run with the plan
    one = torch.stack(cache, 1)
    for run in (wrapper.run, wrapper.run_return_lse):
        again = run(inputs["q"], one, return_lse=True)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


@pytest.mark.parametrize("causal", [False, True])
def test_window_softcap_scale_and_scales(causal):
    options = {"causal": causal, "softcap": 5.0, "scale": 0.5 * 0.25 * 2}
    if causal:
        options["window"] = 3
    case = CASE.with_(options=options)
    inputs = make_inputs(case)
    wrapper, cache = plan_prefill(
        case, inputs, causal=causal, window_left=3, logits_soft_cap=5.0, sm_scale=0.5
    )
    out, lse = wrapper.run(
        inputs["q"], cache, q_scale=0.25, k_scale=2.0, v_scale=4.0, return_lse=True, window_left=3
    )
    assert_attention(out / 4, lse * LN2, documented(case, inputs, causal, 3))


def test_custom_mask_decides_alone_but_for_the_window():
    case = CASE.with_(options={"causal": False})
    inputs = make_inputs(case)
    mask = np.random.default_rng(0).random(np.dot(case.q_lens, case.kv_lens)) < 0.5
    parts = np.split(mask, np.cumsum(np.multiply(case.q_lens, case.kv_lens))[:-1])
    bits = np.concatenate([np.packbits(part, bitorder="little") for part in parts])
    masks = {"custom_mask": torch.tensor(mask)}, {"packed_custom_mask": torch.tensor(bits)}
    for window_left, given in itertools.product((-1, 4), masks):
        wrapper, cache = plan_prefill(case, inputs, **given, causal=True, window_left=window_left)
        out, lse = wrapper.run(inputs["q"], cache, return_lse=True)
        assert_attention(out, lse * LN2, documented(case, inputs, False, window_left, mask))


def test_results_are_written_where_asked_and_values_of_another_width():
    inputs = make_inputs(CASE)
    wrapper, cache = plan_prefill(CASE, inputs, causal=True)
    out, lse = torch.empty_like(inputs["q"]), torch.empty(inputs["q"].shape[:2])
    result = wrapper.run(inputs["q"], cache, out=out, lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert_attention(out, lse * LN2, inputs)
    sinks = torch.linspace(-1, 1, CASE.num_heads)
    out, lse = wrapper.run(inputs["q"], cache, sinks=sinks, return_lse=True)
    assert_attention(out, lse * LN2, inputs | {"sinks": sinks})

    case = CASE.with_(v_head_dim=32, options={"causal": True})
    inputs = make_inputs(case)
    wrapper, cache = plan_prefill(case, inputs, head_dim_vo=32, causal=True, disable_split_kv=True)
    out, lse = wrapper.run(inputs["q"], cache, return_lse=True)
    assert_attention(out, lse * LN2, inputs)


def plan_decode(case, inputs, **options):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(None, inputs["kv_layout"])
    heads = case.num_heads, case.num_kv_heads, case.head_dim
    wrapper.plan(*csr(case, inputs["block_tables"]), *heads, case.page_size, **options)
    return wrapper


@pytest.mark.parametrize(("window_left", "encoding"), [(-1, "NONE"), (5, "NONE"), (-1, "ALIBI")])
def test_decode(window_left, encoding):
    options = {"window": None if window_left < 0 else window_left}
    case = Case((1,) * 4, (37, 0, 8, 1), page_size=8, kv_layout="HND", options=options)
    inputs = make_inputs(case)
    wrapper = plan_decode(case, inputs, window_left=window_left, pos_encoding_mode=encoding)
    cache = torch.stack([inputs["k_cache"], inputs["v_cache"]], 1)
    out, lse = wrapper.run(inputs["q"], cache, return_lse=True)
    expected = documented(case, inputs, True, window_left)
    if encoding == "ALIBI":
        slopes = slopes_of(case.num_heads)[:, None, None]
        expected["bias"] = [slopes * torch.arange(kv) for kv in case.kv_lens]
    assert_attention(out, lse * LN2, expected)


def test_decode_of_codes():
    case = Case(q_lens=(1, 1), kv_lens=(37, 9), page_size=8)
    inputs = make_inputs(case)
    codes = [(inputs[name] * 20).nan_to_num().to(torch.int8) for name in ("k_cache", "v_cache")]
    meant = {"k_cache": codes[0].double() * 0.05, "v_cache": codes[1].double() * 0.05}
    for name in ("kv_data_type", "data_type"):
        wrapper = plan_decode(case, inputs, **{name: torch.int8})
        raw = tuple(x.view(torch.uint8) for x in codes)
        out, lse = wrapper.run(inputs["q"], raw, k_scale=0.05, v_scale=0.05, return_lse=True)
        assert_attention(out, lse * LN2, inputs | meant)


def test_slopes_of_alibi_by_hand():
    halves = [2.0**-n for n in range(1, 9)]
    assert slopes_of(8).tolist() == halves
    between = torch.tensor([0.5, 1.5, 2.5, 3.5])  # 12 heads are no power of two
    assert_similar(slopes_of(12), torch.cat([torch.tensor(halves), 2**-between]))
    assert slopes_of(1).tolist() == [2.0**-8]


@pytest.mark.parametrize("sees", ["causal", "all", "mask", "window"])
@pytest.mark.parametrize("num_heads", [4, 6])
def test_alibi(num_heads, sees):
    case = CASE.with_(num_heads=num_heads, num_kv_heads=2, options={"causal": sees == "causal"})
    inputs = make_inputs(case)
    mask = np.random.default_rng(0).random(np.dot(case.q_lens, case.kv_lens)) < 0.5
    given = {"custom_mask": torch.tensor(mask)} if sees == "mask" else {}
    left = 4 if sees == "window" else -1
    wrapper, cache = plan_prefill(
        case, inputs, causal=sees == "causal", window_left=left, pos_encoding_mode="ALIBI", **given
    )
    out, lse = wrapper.run(inputs["q"], cache, return_lse=True)
    expected = documented(case, inputs, sees == "causal", left, mask if given else True)
    # FlashInfer's kernels add slope * (kv_idx - qo_idx) to logits * sm_scale, for new tokens.
    expected["bias"] = [
        slopes_of(num_heads)[:, None, None] * (torch.arange(kv) - torch.arange(q)[:, None])
        for q, kv in zip(case.q_lens, case.kv_lens, strict=True)
    ]
    assert_attention(out, lse * LN2, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode is not supported, got 'ROPE_L"),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0}, "soft_cap must be 0 with ALIBI"),
        ({"packed_custom_mask": torch.zeros(1)}, "packed_custom_mask must be uint8"),
        ({"packed_custom_mask": torch.zeros(1).byte(), "window_left": 3}, r"must be uint8 \["),
        ({"prefix_len_ptr": torch.zeros(1)}, "prefix_len_ptr is not supported"),
        ({"token_pos_in_items_len": 3}, "token_pos_in_items_len is not supported"),
        *(
            ({"qo_indptr": ends}, "qo_indptr must have 2 elements .*, start at 0 and not decrease")
            for ends in ([0, 1, 2], [0], [[0, 1]], [1, 2], [0, -1])
        ),
        ({"paged_kv_indptr": [0, 3]}, "paged_kv_indptr must start at 0"),
        ({"seq_lens": torch.tensor([10])}, r"seq_lens must be what the pages say, \[11\]"),
        ({"paged_kv_last_page_len": [9]}, r"must be 1 numbers in \[1, 8\], got \[9\]"),
        ({"head_dim_qk": 320}, "scale must be given for head_dim > 256, got head_dim 320"),
    ],
)
def test_what_a_plan_refuses(change, message):
    """A refused plan leaves the earlier one."""
    pages = {"paged_kv_indptr": [0, 2], "paged_kv_indices": [0, 1], "paged_kv_last_page_len": [3]}
    sizes = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim_qk": 16, "page_size": 8}
    arguments = {"qo_indptr": [0, 1], **pages, **sizes}
    wrapper = BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(**arguments)
    with pytest.raises(ValueError, match=f"KVCacheWrapper.plan: .*{message}"):
        wrapper.plan(**arguments | change)
    q, cache = torch.ones(1, 1, 16), torch.ones(2, 8, 1, 16)
    assert torch.equal(wrapper.run(q, (cache, cache)), q)


def test_what_a_run_refuses():
    inputs = make_inputs(CASE)
    unplanned = BatchPrefillWithPagedKVCacheWrapper()
    with pytest.raises(ValueError, match="plan must be called first"):
        unplanned.run(inputs["q"], (inputs["k_cache"], inputs["v_cache"]))
    wrapper, cache = plan_prefill(CASE, inputs, o_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match=r"o_data_type must be that of q \(torch.float32\)"):
        wrapper.run(inputs["q"], cache)
    wrapper, cache = plan_prefill(CASE, inputs, o_data_type="float32")
    with pytest.raises(ValueError, match=r"window_left must be as planned \(-1\), got 3"):
        wrapper.run(inputs["q"], cache, window_left=3)
    for arguments, message in (
        ((cache, 1.0), "custom kernels"),
        ((cache[0],), "a pair of tensors or one of"),
        (((cache[0][:2], cache[1]),), "k_cache must have at least the planned"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(inputs["q"], *arguments)
    with pytest.raises(ValueError, match="kv_layout must be"):
        BatchPrefillWithPagedKVCacheWrapper(kv_layout="HDN")
    with pytest.raises(ValueError, match="jit_args is not supported"):
        BatchDecodeWithPagedKVCacheWrapper(jit_args=["a kernel"])


def make_states(dtype, *shape):
    random = torch.Generator().manual_seed(0)
    v = torch.randn(shape, generator=random).to(getattr(torch, dtype))
    s = 5 * torch.randn(shape[:-1], generator=random)
    s[0, ..., 0] = -torch.inf  # a state without keys
    return v, s


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_merge_states(num_states, dtype):
    v, s = make_states(dtype, 6, num_states, 3, 64)
    before = v.clone(), s.clone()
    merged = flashinfer.merge_states(v, s)
    assert torch.equal(v, before[0])
    assert torch.equal(s, before[1])
    out, lse = cpattn.merge_states(v, s * LN2)
    assert torch.equal(merged[0], out)
    assert_similar(merged[1], lse / LN2)
    with pytest.raises(ValueError, match="merge_states: v must be"):
        flashinfer.merge_states(v[:, :0], s[:, :0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_states_are_merged_as_several_are_and_in_place(dtype):
    v, s = make_states(dtype, 6, 2, 3, 64)
    (first, second), before = zip(v.unbind(1), s.unbind(1), strict=True), (v.clone(), s.clone())
    merged = flashinfer.merge_state(*first, *second)
    assert all(map(torch.equal, merged, flashinfer.merge_states(v, s)))
    for mask in (torch.ones(6).bool(), torch.tensor([True, False, True, False, False, True])):
        mine = first[0].clone(), first[1].clone()
        given = None if mask.all() else mask
        flashinfer.merge_state_in_place(*mine, *second, mask=given)
        assert torch.equal(mine[0], merged[0].where(mask[:, None, None], first[0]))
        assert torch.equal(mine[1], merged[1].where(mask[:, None], first[1]))
    assert all(map(torch.equal, (v, s), before))


CODES = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("kv_layout", "dtype"), [("NHD", CODES[0]), ("HND", CODES[1]), ("NHD", CODES[2])]
)
def test_codes(kv_layout, dtype):
    """Caches of codes have their dtype, or uint8 with the planned dtype."""
    case = CASE.with_(kv_layout=kv_layout)
    inputs = make_inputs(case)
    codes = [(inputs[name] * 20).nan_to_num().to(dtype) for name in ("k_cache", "v_cache")]
    heads = torch.tensor([0.05, 0.08])
    factor = heads.view(2, 1, 1) if kv_layout == "HND" else heads.view(2, 1)
    meant = {"k_cache": codes[0].double() * factor, "v_cache": codes[1].double() * 0.07}
    scales = {"k_scale": heads, "v_scale": 0.07, "return_lse": True}
    raw = [x.view(torch.uint8) for x in codes]
    for planned in ({}, {"kv_data_type": dtype}, {"kv_data_type": str(dtype)[6:]}):
        wrapper, _ = plan_prefill(case, inputs, causal=True, **planned)
        results = [wrapper.run(inputs["q"], tuple(codes), **scales)]
        if planned:
            results.append(wrapper.run(inputs["q"], torch.stack(raw, 1), **scales))
        for out, lse in results:
            assert_attention(out, lse * LN2, documented(case, inputs | meant, True))
    other = "int8" if dtype != torch.int8 else "float8_e5m2"
    wrapper, _ = plan_prefill(case, inputs, kv_data_type=other)
    with pytest.raises(ValueError, match=f"k_cache must be {other}, as kv_dtype says"):
        wrapper.run(inputs["q"], tuple(codes), **scales)
