# SPDX-License-Identifier: Apache-2.0
"""Refusals of paged_attention: their messages, and that nothing is written."""

import math

import numpy as np
import pytest
import torch

import cpattn
from support.attention_cases import plan_of
from support.cases import Case, make_inputs

CASE = Case(q_lens=(2, 3), kv_lens=(20, 33), num_heads=4, num_kv_heads=2, head_dim=32)


def plain_inputs():
    """Return contiguous arguments with 7 pages of 16, to change one at a time."""
    inputs = make_inputs(CASE)
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].contiguous()
    return inputs


def changed_table(row, column, value):
    tables = plain_inputs()["block_tables"].copy()
    tables[row, column] = value
    return tables


CSR = {
    "block_tables": None, "kv_lens": None,
    "kv_indptr": [0, 2, 5], "kv_indices": [0, 1, 2, 3, 4], "last_page_len": [4, 1],
}  # fmt: skip
VALUE_ERRORS = [
    ({"q": torch.zeros(6, 4, 32)}, r"q must have .*new token, sum\(q_lens\) = 5, got 6"),
    ({"q": torch.zeros(5, 3, 32)}, r"num_heads must be a positive multiple of .*got 3"),
    (
        {"q": torch.zeros(5, 4, 577), "k_cache": torch.zeros(7, 16, 2, 577), "scale": 1.0},
        r"head_dim must be in \[1, 576\], got 577",
    ),
    ({"k_cache": torch.zeros(7, 16, 2, 32).half()}, "k_cache must be float32, got"),
    ({"k_cache": torch.zeros(7, 16, 2, 48)}, "k_cache must .*dimension 32 like q, got 48"),
    ({"k_cache": torch.zeros(7, 16)}, "k_cache must have 3 dimensions"),
    ({"v_cache": torch.zeros(7, 16, 1, 32)}, "v_cache must have 2 KV heads, got 1"),
    ({"page_size": 8}, "page_size 8 does not agree with k_cache, whose pages hold 16"),
    (
        {"k_cache": torch.zeros(112, 2, 32), "page_size": None},
        "page_size is required for a 3-dimensional k_cache",
    ),
    ({"k_cache": torch.zeros(100, 2, 32)}, "k_cache .*slots, got 100"),
    ({"kv_layout": "BSND"}, "kv_layout must be 'NHD' or 'HND', got 'BSND'"),
    ({"k_cache": torch.zeros(112, 2, 32), "kv_layout": "HND"}, "a 3-dimensional k_cache is"),
    ({"q_lens": [6, -1]}, r"q_lens must be in \[0, 2\^31\), got -1 at index 1"),
    ({"kv_lens": [-3, 33]}, "kv_lens must be in .*, got -3 at index 0"),
    ({"kv_lens": [20, 2**31]}, "kv_lens must be in .*, got 2147483648 at index 1"),
    ({"kv_lens": [20]}, "q_lens and kv_lens .*have the same length, got 2 and 1"),
    (
        {"block_tables": [[0, 1, 2]]},
        r"block_tables must .*per sequence \(2\), got 1; lengths must not be cumulative",
    ),
    ({"block_tables": [[0, 1], [2, 3]]}, r"block_tables must .*page_size 16\)"),
    ({"block_tables": changed_table(1, 2, -1)}, "page ids must .*2 of sequence 1"),
    ({"block_tables": changed_table(0, 1, 7)}, "page ids must .*1 of sequence 0"),
    ({"scale": -1.0}, "scale must be a positive number, got -1"),
    ({"scale": 1e-300}, "scale must be in .*, the range of float32, got 1e-300"),
    ({"scale": math.nan}, "scale must be a positive number, got nan"),
    ({"softcap": -2.0}, r"softcap must be 0 .* or in \[1e-37, 1e\+37\], .*, got -2"),
    ({"softcap": 1e-300}, "softcap must be 0 .* got 1e-300"),
    ({"softcap": 1e39}, "softcap must be 0 .*, got 1e\\+39"),
    ({"window": -1}, "window must be >= 0"),
    (
        {"window": 3, "causal": False},
        r"window must be a pair \(left, right\) unless causal=True, got 3; None is a side without",
    ),
    ({"causal": [True]}, "causal must be a bool or 2 bools, .*, got 1"),
    ({"window": 3, "causal": [True, False]}, "window must be a pair"),
    ({"first_positions": [0]}, "first_positions must have 2 ints, .*, got 1"),
    ({"first_positions": [0, 2**31]}, "first_positions must be in .* at index 1"),
    ({"window": (1, 2, 3)}, r"window must be a pair .*, got 3 items"),
    ({"window": (1, -2)}, "window must be >= 0 .*, got -2"),
    ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\], got \[3\]"),
    ({"sinks": torch.zeros(4).half()}, "sinks must be float32, got float16"),
    ({"bias": torch.zeros(4, 3, 33)}, r"bias must be \[batch, .*got shape \[4, 3, 33\]"),
    ({"bias": torch.zeros(1, 1, 3, 33).long()}, "bias must be float32, .*got int64"),
    ({"bias": torch.zeros(3, 1, 3, 33)}, r"bias must have 2 \(sequences\) or 1 in .* 0"),
    ({"bias": torch.zeros(2, 2, 3, 33)}, r"bias must have 4 \(num_heads\) or 1 in .* 1"),
    ({"bias": torch.zeros(2, 4, 2, 33)}, r"must have at least 3 \(new tokens\) or 1 in"),
    ({"bias": torch.zeros(2, 4, 3, 32)}, r"must have at least 33 \(keys\) or 1 in .* 3"),
    ({"bias": [torch.zeros(4, 2, 20)]}, "bias must be .*a list of 2 tensors, .*, got 1"),
    (
        {"bias": [torch.zeros(4, 2, 20), torch.zeros(4, 3, 32)]},
        r"bias\[1\] must have at least 33 \(keys\) or 1 in dimension 2, got shape \[4, 3, 32\]",
    ),
    ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes must have shape \[4\], got \[2\]"),
    ({"alibi_slopes": torch.zeros(1, 4)}, r"alibi_slopes must have shape \[2, 4\]"),
    ({"alibi_slopes": torch.zeros(4).half()}, "alibi_slopes must be float32, got"),
    (
        {"alibi_slopes": torch.tensor([0, 0, math.inf, 0])},
        "alibi_slopes must be finite, got inf of head 2",
    ),
    (
        {"relative_bias": torch.zeros(4, 6)},
        r"relative_bias must be \[4, 2 \* max_distance \+ 1\], got shape \[4, 6\]",
    ),
    ({"custom_mask": torch.ones(138, dtype=torch.bool)}, "custom_mask .*got 138"),
    ({"num_threads": 0}, "num_threads must be >= 1, got 0"),
    ({"block_tables": None}, "give either block_tables with kv_lens, or kv_indptr"),
    (CSR | {"q_lens": [5]}, r"q_lens must .* of kv_indptr \(2\), got 1"),
    (
        CSR | {"kv_indptr": [0, 1, 3], "kv_indices": [0, 1, 2], "last_page_len": [1, 1]},
        "kv_indptr and last_page_len must count the new tokens .* got kv_len 1 for q_len 2",
    ),
    ({"kv_indptr": [0, 1]}, "kv_indptr, kv_indices and last_page_len must be given"),
]


@pytest.mark.parametrize(("change", "message"), VALUE_ERRORS, ids=lambda x: str(x)[:40])
def test_value_errors_name_function_argument_rule_and_value(change, message):
    out = torch.full((5, 4, 32), 7.0)
    with pytest.raises(ValueError, match=message) as error:
        cpattn.paged_attention(**(plain_inputs() | {"out": out} | change))
    assert str(error.value).startswith("paged_attention: ")
    assert torch.all(out == 7)


def test_a_table_without_rows_is_named():
    message = "paged_attention: block_tables must be a list of lists, a row for each sequence, got"
    with pytest.raises(TypeError, match=message):
        cpattn.paged_attention(**plain_inputs() | {"block_tables": [1, 2]})


def test_the_default_scale_is_refused_for_wide_heads():
    inputs = make_inputs(CASE.with_(head_dim=272))
    with pytest.raises(ValueError, match=r"scale must be given for head_dim > 256, got .* 272"):
        cpattn.paged_attention(**inputs)


INPUTS = ("q", "k_cache", "v_cache", "sinks", "bias", "alibi_slopes", "relative_bias")


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("output", ["out", "lse"])
def test_outputs_that_overlap_inputs_are_refused(output, name):
    inputs = plain_inputs() | {"sinks": torch.zeros(4), "bias": torch.zeros(1, 4, 3, 33)}
    inputs |= {"alibi_slopes": torch.zeros(4), "relative_bias": torch.zeros(4, 5)}
    whole = torch.zeros(inputs[name].numel() + 1000)
    inputs[name] = whole[: inputs[name].numel()].view(inputs[name].shape).copy_(inputs[name])
    begin = inputs[name].numel() - 1  # one common element
    shape = (5, 4, 32) if output == "out" else (5, 4)
    result = whole[begin : begin + math.prod(shape)].view(shape)
    with pytest.raises(ValueError, match=f"{output} must not overlap {name} in memory"):
        cpattn.paged_attention(**inputs, **{output: result}, return_lse=True)


SHARED = torch.zeros(641)  # memory of an output and an LSE that overlap


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"out": torch.zeros(5, 4, 16)}, r"out must have shape \[5, 4, 32\], got \[5, 4, 16\]"),
        ({"out": torch.zeros(5, 4, 32).half()}, "out must be float32, got float16"),
        ({"lse": torch.zeros(5, 4).double()}, "lse must be float32, got float64"),
        ({"lse": torch.zeros(4, 5)}, r"lse must have shape \[5, 4\], got \[4, 5\]"),
        ({"out": torch.zeros(1, 4, 32).expand(5, 4, 32)}, "out must not be a broadcast view"),
        (
            {"out": SHARED[:640].view(5, 4, 32), "lse": SHARED[-20:].view(5, 4)},
            "lse must not overlap out",
        ),
    ],
)
def test_outputs_of_the_wrong_kind_are_refused(outputs, message):
    with pytest.raises(ValueError, match=message):
        cpattn.paged_attention(**plain_inputs(), **outputs, return_lse=True)
    assert not SHARED.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads must be a positive multiple of num_kv_heads"),
        ({"head_dim": 0}, r"head_dim must be in \[1, 576\], got 0"),
        ({"v_head_dim": 592}, r"v_head_dim must be in \[1, 576\], got 592"),
        ({"page_size": 0}, r"page_size must be in \[1, 2147483647\], got 0"),
        ({"num_pages": 3}, r"page ids must be in \[0, 3\), got"),
    ],
)
def test_plans_are_checked_when_made(change, message):
    arguments = {name: plain_inputs()[name] for name in ("q_lens", "kv_lens", "block_tables")}
    arguments |= {"page_size": 16, "num_pages": 7}
    arguments |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    with pytest.raises(ValueError, match=f"^plan_attention: {message}"):
        cpattn.plan_attention(**(arguments | change))


def test_what_does_not_fit_a_plan_is_refused():
    plan = plan_of(plain_inputs())
    assert not plan.page_ids.flags.writeable
    restore, (state,) = plan.__reduce__()[:2]
    for position in ([2**40, 0], [0]):
        with pytest.raises(ValueError, match=r"^AttentionPlan: first_positions.* must be"):
            restore((*state[:6], np.array(position), *state[7:]))
    small = torch.zeros(6, 16, 2, 32)
    with pytest.raises(ValueError, match="run_attention: k_cache must have at least the planned 7"):
        cpattn.run_attention(plan, torch.zeros(5, 4, 32), small, small)
