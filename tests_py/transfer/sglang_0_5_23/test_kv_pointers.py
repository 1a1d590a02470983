# SPDX-License-Identifier: Apache-2.0
"""Buffers meet as in tables of what engines do, right or wrong, and in every geometry."""

from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import get_mha_kv_ptrs_with_pp, get_mla_kv_ptrs_with_pp


def names(groups, layers, drafts=0):
    """Return the list that a server registers: layers of each group, then drafts of each group."""
    return [f"{g}{i}" for g in groups for i in layers] + [
        f"d{g}{k}" for g in groups for k in range(drafts)
    ]


# A row has layers, drafts, first, end, and the buffers that compat takes for V.
MHA_TABLE = [
    (15, 0, 0, 7, "K14 V0 V1 V2 V3 V4 V5"),
    (15, 0, 7, 15, "V0 V1 V2 V3 V4 V5 V6 V7"),
    (4, 0, 2, 4, "V2 V3"),
    (4, 1, 0, 2, "V0 V1"),
    (4, 2, 0, 2, "V2 V3"),
    (4, 2, 2, 4, "dK0 dK1"),
    (4, 4, 0, 4, "dK0 dK1 dK2 dK3"),
]


@pytest.mark.parametrize(("layers", "drafts", "first", "end", "dst_v"), MHA_TABLE)
def test_mha_table(layers, drafts, first, end, dst_v):
    stage, decode = names("KV", range(first, end)), names("KV", range(layers), drafts)
    n = end - first
    src_k, src_v = stage[:n], stage[n:]
    where = {"prefill_start_layer": first}
    found = get_mha_kv_ptrs_with_pp(stage, decode, **where, total_kv_layers=layers)
    assert found == (src_k, src_v, src_k, src_v, n)
    found = get_mha_kv_ptrs_with_pp(stage, decode, **where, compat=True)
    assert found == (src_k, src_v, src_k, dst_v.split(), n)
    for compat in (False, True):  # lists that are equal need no total
        found = get_mha_kv_ptrs_with_pp(decode, decode, prefill_start_layer=0, compat=compat)
        assert found[2:] == (*found[:2], layers + drafts)
    for unknown in ({}, {"total_kv_layers": None}):
        with pytest.raises(ValueError, match="number of target layers must be given"):
            get_mha_kv_ptrs_with_pp(stage, decode, **where, **unknown)


STAGE, DECODE, INT = names("KV", [2, 3]), names("KV", range(4)), "must fit into int32, got"


@pytest.mark.parametrize(
    ("src", "dst", "first", "total", "message"),
    [
        (STAGE, DECODE[:6], 2, 4, r"source layers \[2, 4\).* 4 entries.* 6 entries"),
        (STAGE, DECODE[:6], 2, 4, "destination holds 3 of 4 layers per group"),
        (STAGE, DECODE, 2, 3, "source must end within the 3 target layers"),
        (STAGE[:3], DECODE, 2, 4, "source must have equally many.* got 3"),
        (STAGE, DECODE[:7], 2, 4, "destination must have equally many.* got 7"),
        (STAGE, DECODE, -1, 4, "prefill_start_layer must be >= 0, got -1"),
        (STAGE, DECODE, 2**63 - 1, 4, f"prefill_start_layer {INT} {2**63 - 1}"),
        ([], DECODE, 0, None, "an entry of K and one of V at least, got 0 in all"),
        (["K0"], DECODE, 0, None, "an entry of K and one of V at least, got 1 in all"),  # compat
        # A prefill stage with drafts: K and V are no longer halves of its list.
        (names("KV", [2, 3], 1), names("KV", range(4), 1), 2, 4, "source must end within the 4"),
    ],
)
def test_mha_refuses(src, dst, first, total, message):
    options = {"compat": True} if total is None else {"total_kv_layers": total}
    with pytest.raises(ValueError, match=f"^get_mha_kv_ptrs_with_pp: .*{message}"):
        get_mha_kv_ptrs_with_pp(src, dst, prefill_start_layer=first, **options)


NSA, MLA = "KVI", "KV"
DRAFTED = names(MLA, range(4), 1)


@pytest.mark.parametrize(
    ("src", "dst", "changes", "message"),
    [
        (names(MLA, [2, 3], 1), names(MLA, range(4), 2), {}, "as many drafts.* got 2"),
        (names(MLA, [2, 3], 1), names(MLA, range(4)), {}, "as many drafts.* got 0"),
        (names(MLA, [1, 2], 1), DRAFTED, {"prefill_start_layer": 1}, "the stage with drafts must"),
        # The sides have equally many entries, but K2 is not the destination's fourth.
        (names(MLA, range(3), 1), DECODE, {"prefill_start_layer": 0}, ".* must end at layer 4"),
        (
            names(MLA, [3], 1),
            names(MLA, range(3)),
            {"prefill_start_layer": 3},
            "destination holds 3",
        ),
        ([], DRAFTED, {}, "draft_kv_layers must be between 0 and the source's 0"),
        (names(MLA, [3], 1)[:3], DRAFTED, {}, "source must have equally many.* 2 groups, got 3"),
        (names(MLA, [2], 1), DRAFTED[:9], {}, "destination must have equally many.* got 9"),
        ([1], [1, 2], {"prefill_start_layer": 2**63 - 1}, f"prefill_start_layer {INT} {2**63 - 1}"),
    ],
)
def test_mla_refuses(src, dst, changes, message):
    stage = {
        "prefill_start_layer": 2, "kv_buf_groups": 2, "hidden_kv_layers": 4, "draft_kv_layers": 1,
        "is_last_rank": True,
    } | changes  # fmt: skip
    with pytest.raises(ValueError, match=f"^get_mla_kv_ptrs_with_pp: .*{message}"):
        get_mla_kv_ptrs_with_pp(src, dst, **stage)


@pytest.mark.parametrize("total", [0, None])
def test_an_unknown_number_of_layers(total):
    src = names(NSA, range(3))
    stage = {"prefill_start_layer": 0, "kv_buf_groups": 3, "total_kv_layers": total}
    assert get_mla_kv_ptrs_with_pp(src, src, **stage) == (src, src, 9)
    with pytest.raises(ValueError, match="number of target layers must be given"):
        get_mla_kv_ptrs_with_pp(src, names(NSA, range(3), 1), **stage)


def test_pointers_in_arrays():
    """Pointers may be arrays or tensors on either side."""
    stage, decode = np.array([7, 8], np.uint64), torch.tensor([1, 2, 3, 4])
    where = {"prefill_start_layer": 1, "total_kv_layers": 2}
    for src, dst in ((stage, decode), (decode[:2] + 6, stage.tolist() * 2), ((7, 8), decode)):
        wanted = [2, 4] if dst is decode else [8, 8]
        found = get_mla_kv_ptrs_with_pp(src, dst, kv_buf_groups=2, **where)
        assert found == ([7, 8], wanted, 2)
        assert all(type(ptr) is int for ptr in found[0] + found[1])
        found = get_mha_kv_ptrs_with_pp(src, dst, **where)
        assert found == ([7], [8], wanted[:1], wanted[1:], 1)
        assert all(type(ptr) is int for ptrs in found[:4] for ptr in ptrs)


def rule_of_23893(dst, num_src, first, groups, total):
    num_dst = len(dst) // groups
    if total:
        num_dst = min(num_dst, total)
    if num_src // groups == num_dst:
        return dst
    starts = [g * num_dst + first for g in range(groups)]
    return [*chain(*(dst[start : start + num_src // groups] for start in starts))]


small = st.integers(0, 9)


@given(small, st.integers(0, 30), small, st.integers(1, 3), small)
def test_compat_is_the_rule_with_slices_of_python(num_src, num_dst, first, groups, total):
    """test_upstream_kv_send.py tests the later rules, those of plan_send_kvcache."""
    src, dst = list(range(num_src)), list(range(100, 100 + num_dst))
    stage = {"prefill_start_layer": first, "kv_buf_groups": groups, "total_kv_layers": total}
    found = get_mla_kv_ptrs_with_pp(src, dst, **stage, compat=True)
    assert found == (src, rule_of_23893(dst, num_src, first, groups, total), num_src)


def test_strict_is_right_or_refuses():
    """All small layouts of both sides are tried, with drafts and with more or less knowledge.

    The destination has the whole model, or the source's stage with too few drafts to look like
    the whole model; the source tells the truth. Wrong buffers never come out, and if all is known
    and drafts fit, a destination with the whole model is always answered.
    """
    answered = refused = 0
    for layers, groups, own, other in product(range(1, 5), ("X", MLA, NSA), range(3), range(3)):
        for first, end in ((a, b) for a in range(layers) for b in range(a, layers + 1)):
            is_last = end == layers
            src = names(groups, range(first, end), own if is_last else 0)
            for held, knows in product(("model", "stage"), ("hidden", "total", "nothing")):
                held_range = range(layers) if held == "model" else range(first, end)
                dst = names(groups, held_range, other if held == "model" or is_last else 0)
                looks_whole = len(dst) >= layers * len(groups) and len(held_range) < layers
                if held == "stage" and looks_whole:
                    continue
                told = {
                    "hidden": {"hidden_kv_layers": layers, "draft_kv_layers": own},
                    "total": {"total_kv_layers": layers},
                    "nothing": {},
                }[knows]
                stage = {"prefill_start_layer": first, "kv_buf_groups": len(groups), **told}
                try:
                    found = get_mla_kv_ptrs_with_pp(src, dst, **stage, is_last_rank=is_last)
                except ValueError:
                    refused += 1
                    drafts_fit = own in (0, other) or not is_last
                    assert not (held == "model" and knows == "hidden" and drafts_fit)
                    continue
                answered += 1
                assert found == (src, src, len(src))
    assert answered > refused / 2


# These lists have one entry for each layer, and drafts at their end.
FLAT = {"prefill_start_layer": 2, "num_draft_entries": 1}


def test_drafts_that_decode_has_not_or_has_more_of():
    stage = ["K2", "K3", "dK"]
    none, more = ["K0", "K1", "K2", "K3"], ["K0", "K1", "K2", "K3", "dK0", "dK1"]
    assert get_mla_kv_ptrs_with_pp(stage, none, **FLAT, compat=True)[1] == ["K2", "K3", "K3"]
    assert get_mla_kv_ptrs_with_pp(stage, more, **FLAT, compat=True)[1] == ["K2", "K3", "dK1"]
    for decode, num_drafts in ((none, 0), (more, 2)):
        message = f"must hold as many drafts as the source, got {num_drafts}; "
        with pytest.raises(ValueError, match=message):
            get_mla_kv_ptrs_with_pp(stage, decode, **FLAT)


@given(st.integers(1, 8), st.integers(0, 3), st.data())
def test_stages_and_layer_splits_of_flat_lists(num_layers, drafts, data):
    decode = [f"K{i}" for i in range(num_layers)] + [f"dK{i}" for i in range(drafts)]
    cuts = sorted(data.draw(st.lists(st.integers(0, num_layers), max_size=3)))
    arrived = []
    for start, end in zip([0, *cuts], [*cuts, num_layers], strict=True):
        is_last = len(arrived) + end - start == num_layers and end == num_layers and start < end
        own = decode[start : len(decode) if is_last else end]
        found = get_mla_kv_ptrs_with_pp(
            own, decode, prefill_start_layer=start, total_kv_layers=num_layers,
            num_draft_entries=drafts if is_last else 0,
        )  # fmt: skip
        assert found == (own, own, len(own))
        arrived += found[1]
    assert arrived[:num_layers] == decode[:num_layers]


@pytest.mark.parametrize(
    ("ptrs", "options", "message"),
    [
        ([1, 2], {"kv_buf_groups": 2}, "kv_buf_groups must be 1 with num_draft_entries, got 2"),
        ([1, 2], {"kv_buf_groups": 2, "compat": True}, "kv_buf_groups must be 1 with num_draft_en"),
        ([1, 2, 3], {"num_draft_entries": -1}, "num_draft_entries must be between 0 and the 3 .*"),
        ([1, 2, 3], {"num_draft_entries": 4}, "num_draft_entries must be between 0 and the 3 .* g"),
        ([1], {"num_draft_entries": 2**40}, "num_draft_entries must fit into int32"),
    ],
)
def test_drafts_of_flat_lists_refused(ptrs, options, message):
    with pytest.raises(ValueError, match=f"^get_mla_kv_ptrs_with_pp: {message}"):
        get_mla_kv_ptrs_with_pp(ptrs, [4] * 9, **(FLAT | options))
