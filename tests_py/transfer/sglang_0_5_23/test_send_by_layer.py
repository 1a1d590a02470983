# SPDX-License-Identifier: Apache-2.0
"""Buffers that find each other by the layers they hold, wherever they lie in the lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import KVArgs, plan_send_kvcache, plan_send_kvcache_slice
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


def send(src, dst, *, src_lens=None, groups=1, pp_size=2, is_mla=False, ptrs=None, **options):
    args = sender(src)
    args.kv_item_lens, args.kv_buf_groups = src_lens or args.kv_item_lens, groups
    target = [DST + i * STEP for i in range(len(dst) if ptrs is None else ptrs)]
    options = {"pp_size": pp_size, "is_mla": is_mla, "dst_layer_ids": dst} | options
    return plan_send_kvcache(args, target, [0], [0], **options)


PAIRED = [
    # ids of both sides, options, pairs of entries
    ([4, 7], [7, 4], {"src_lens": [64, 96], "dst_item_lens": [96, 64]}, [(0, 1), (1, 0)]),
    # As engines do: half a layer is sent alone, and entries without a length are left out.
    ([0, 1], [0, 1, 0, 1], {"compat": True}, [(0, 0), (1, 1)]),
    ([4, 7], [4, 7], {"src_lens": [64, 0], "is_mla": True, "compat": True}, [(0, 0)]),
    *(
        ([0, 1, 0, 1], [], {"pp_size": 1, "ptrs": 6, "compat": compat}, [(i, i) for i in range(4)])
        for compat in (False, True)
    ),
]


@pytest.mark.parametrize(("src", "dst", "options", "pairs"), PAIRED)
def test_entries_that_pair(src, dst, options, pairs):
    assert entries_of(send(src, dst, **options)) == pairs


BOTH = "Layer metadata must be provided by both PD peers or neither, got 4 ids of the source"
MISSING = "Decode peer is missing a transfer entry for model layer "
ALWAYS = [
    ([0, 1, 0, 1], [], {"ptrs": 6}, RuntimeError, BOTH),
    ([0, 9], [0, 1], {}, RuntimeError, MISSING + "9"),
    ([0, 1], [0], {"ptrs": 2}, RuntimeError, r"dst metadata=1 entries=2"),
    ([0, 1], [0, 1], {"groups": 0, "is_mla": True}, ValueError, "kv_buf_groups must be >= 1, g"),
]
SHORT = "source must have layer 0 as often as the destination, got 1 fewer"
STRICT = [
    # A sender that lists K alone would leave V of the destination as it was.
    ([0, 1], [0, 1, 0, 1], {}, ValueError, f"plan_send_kvcache: {SHORT}"),
    ([4, 7], [7, 4], {"src_lens": [64, 96], "dst_item_lens": [64, 96]}, ValueError,
     "got 64 of source entry 0 and 96 of destination entry 1"),
    ([4, 7], [4, 7], {"src_lens": [64, 0]}, ValueError, "source item lengths must be > 0, got 0 o"),
    ([0, 1], ["a", "b"], {}, TypeError, "plan_send_kvcache: dst_layer_ids must hold integers"),
    ([0.5, 1.5], [0, 1], {}, TypeError, "plan_send_kvcache: kv_layer_ids must hold integers"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("src", "dst", "options", "error", "message", "compat"),
    [
        *((*row, compat) for row in ALWAYS for compat in (False, True)),
        *((*x, False) for x in STRICT),
    ],
)
def test_what_cannot_be_paired_is_refused(src, dst, options, error, message, compat):
    with pytest.raises(error, match=message):
        send(src, dst, **options, compat=compat)
