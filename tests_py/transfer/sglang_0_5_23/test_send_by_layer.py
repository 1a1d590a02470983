# SPDX-License-Identifier: Apache-2.0
"""Buffers that find each other by the layers they hold, wherever they lie in the lists."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer import KVArgs, plan_send_kvcache, plan_send_kvcache_slice
from support.transfer.plan_blocks import blocks

SRC, DST = 1 << 40, 1 << 44
STEP = 1 << 24
ITEM = 64
SLICED = {"dst_tp_rank": 1, "dst_attn_tp_size": 2, "dst_kv_item_len": ITEM // 2, "attn_tp_size": 1}


def sender(ids, base=SRC) -> KVArgs:
    return KVArgs(
        engine_rank=0, page_size=2, total_kv_head_num=4, kv_layer_ids=list(ids),
        kv_data_ptrs=[base + i * STEP for i in range(len(ids))], kv_item_lens=[ITEM] * len(ids),
    )  # fmt: skip


def entries_of(plan) -> list[tuple[int, int]]:
    """The entries that a plan of one page joins, of source and destination."""
    pairs = [((src - SRC) // STEP, (dst - DST) // STEP) for src, dst, _ in blocks(plan)]
    return list(dict.fromkeys(pairs))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), st.data(), st.booleans())
def test_stages_of_hybrid_models_reach_their_layers(layers, data, compat):
    """#32270: stages of layers that attend, counted by ordinal, met those of another stage."""
    own = data.draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
    src_ids = own * 2  # K, then V
    dst_ids = data.draw(st.permutations(layers)) * 2
    args, target = sender(src_ids), sender(dst_ids, DST)
    expected = [
        (i, dst_ids.index(layer) + (len(layers) if i >= len(own) else 0))
        for i, layer in enumerate(src_ids)
    ]
    to = args, target.kv_data_ptrs, [3], [5]
    ids = {"dst_layer_ids": np.array(dst_ids), "compat": compat}
    whole = plan_send_kvcache(
        *to, pp_size=data.draw(st.integers(1, 3)), is_mla=data.draw(st.booleans()), **ids
    )
    assert entries_of(whole) == expected
    sliced = plan_send_kvcache_slice(*to, pp_size=data.draw(st.integers(1, 3)), **SLICED, **ids)
    assert entries_of(sliced) == expected


def test_ids_of_one_side_are_no_pairing():
    args, target = sender([0, 1, 0, 1]), [DST + i * STEP for i in range(6)]
    both = "Layer metadata must be provided by both PD peers or neither, got 4 ids of the source"
    for compat in (False, True):
        with pytest.raises(RuntimeError, match=both):
            plan_send_kvcache(args, target, [0], [0], pp_size=2, is_mla=False, dst_layer_ids=[],
                              compat=compat)  # fmt: skip
        plan = plan_send_kvcache(args, target, [0], [0], pp_size=1, is_mla=False,
                                 dst_layer_ids=[], compat=compat)  # fmt: skip
        assert entries_of(plan) == [(i, i) for i in range(4)]


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, 9], [0, 1], "Decode peer is missing a transfer entry for model layer 9"),
        ([0, 0], [0, 1], "Decode peer is missing a transfer entry for model layer 0"),
        ([0, 1, 2], [0, 1], "Decode peer is missing a transfer entry for model layer 2"),
    ],
)
def test_what_cannot_be_paired_is_refused(src, dst, message, compat):
    target = sender(dst, DST)
    with pytest.raises(RuntimeError, match=message):
        plan_send_kvcache(sender(src), target.kv_data_ptrs, [0], [0], pp_size=2, is_mla=False,
                          dst_layer_ids=dst, compat=compat)  # fmt: skip
    with pytest.raises(RuntimeError, match=r"dst metadata=1 entries=\d"):
        plan_send_kvcache(sender(src), target.kv_data_ptrs, [0], [0], pp_size=2, is_mla=False,
                          dst_layer_ids=dst[:1], compat=compat)  # fmt: skip


def test_half_a_layer_is_refused():
    """A sender that lists K alone would leave V of the destination as it was."""
    args, dst = sender([0, 1]), sender([0, 1, 0, 1], DST)
    send = args, dst.kv_data_ptrs, [0], [0]
    message = "plan_send_kvcache: source must have layer 0 as often as the destination, got 1 fewer"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_send_kvcache(*send, pp_size=2, is_mla=False, dst_layer_ids=dst.kv_layer_ids)
    plan = plan_send_kvcache(
        *send, pp_size=2, is_mla=False, dst_layer_ids=dst.kv_layer_ids, compat=True
    )
    assert entries_of(plan) == [(0, 0), (1, 1)]


def test_item_lengths_are_those_of_the_paired_entries():
    args, target = sender([4, 7]), sender([7, 4], DST)
    args.kv_item_lens, target.kv_item_lens = [64, 96], [96, 64]
    send = args, target.kv_data_ptrs, [0], [0]
    ids = {"dst_layer_ids": [7, 4], "dst_item_lens": [96, 64]}
    plan = plan_send_kvcache(*send, pp_size=2, is_mla=False, **ids)
    assert entries_of(plan) == [(0, 1), (1, 0)]
    ids["dst_item_lens"] = [64, 96]
    message = "got 64 of source entry 0 and 96 of destination entry 1"
    with pytest.raises(ValueError, match=message):
        plan_send_kvcache(*send, pp_size=2, is_mla=False, **ids)


def test_compat_leaves_out_entries_without_a_length():
    args = sender([4, 7])
    args.kv_item_lens = [64, 0]
    send = args, [DST, DST + STEP], [0], [0]
    plan = plan_send_kvcache(*send, pp_size=2, is_mla=True, dst_layer_ids=[4, 7], compat=True)
    assert entries_of(plan) == [(0, 0)]
    with pytest.raises(ValueError, match="source item lengths must be > 0, got 0 of entry 1"):
        plan_send_kvcache(*send, pp_size=2, is_mla=True, dst_layer_ids=[4, 7])


def test_ids_are_named_in_errors():
    send = sender([0, 1]), [DST, DST + STEP], [0], [0]
    with pytest.raises(TypeError, match="plan_send_kvcache: dst_layer_ids must hold integers"):
        plan_send_kvcache(*send, pp_size=1, is_mla=True, dst_layer_ids=["a", "b"])
    send[0].kv_layer_ids = [0.5, 1.5]
    with pytest.raises(TypeError, match="plan_send_kvcache: kv_layer_ids must hold integers"):
        plan_send_kvcache(*send, pp_size=1, is_mla=True, dst_layer_ids=[0, 1])


@pytest.mark.parametrize("compat", [False, True])
def test_groups_are_checked_with_ids_too(compat):
    args = sender([0, 1])
    args.kv_buf_groups = 0
    with pytest.raises(ValueError, match="plan_send_kvcache: kv_buf_groups must be >= 1, got 0"):
        plan_send_kvcache(args, [DST, DST + STEP], [0], [0], pp_size=1, is_mla=True,
                          dst_layer_ids=[0, 1], compat=compat)  # fmt: skip
