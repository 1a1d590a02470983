# SPDX-License-Identifier: Apache-2.0
"""Heads of pages between ranks of unequal tensor parallelism; fleets send them token by token."""

import pytest

from cpattn.transfer.sglang_0_5_23 import KVArgs, plan_send_kvcache_slice, slice_heads
from support.transfer.plan_blocks import blocks

BASE = 1 << 48


def slice_plan(args, num_dst, **arguments):
    defaults = {"dst_tp_rank": 0, "dst_attn_tp_size": 1, "attn_tp_size": 2, "dst_kv_item_len": 64}
    dst_ptrs = [2 * BASE + i * 0x10000 for i in range(num_dst)]
    return plan_send_kvcache_slice(args, dst_ptrs, [0], [0], **(defaults | arguments))


def slice_args(num_entries, item_len, **attributes):
    return KVArgs(
        kv_data_ptrs=[BASE + i * 0x10000 for i in range(num_entries)],
        kv_item_lens=[item_len] * num_entries, **{"engine_rank": 1, "page_size": 1} | attributes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attributes", "item", "dst_item", "at", "length"),
    [
        ({"kv_head_num": 3}, 24, 48, 24, 24),  # heads of a rank, times ranks
        *(({"kv_head_num": 3, "total_kv_head_num": n}, 24, 48, 24, 24) for n in (None, 0, -1)),
        ({"kv_head_num": 1, "total_kv_head_num": 1}, 64, 64, 0, 64),  # which every rank holds
        ({"total_kv_head_num": 2, "dst_tp_rank": 1, "dst_attn_tp_size": 2}, 64, 64, 0, 64),
    ],
)
def test_numbers_of_heads(attributes, item, dst_item, at, length):
    places = {name: value for name, value in attributes.items() if name.startswith("dst")}
    args = slice_args(2, item, **{k: v for k, v in attributes.items() if k not in places})
    plan = slice_plan(args, 2, dst_kv_item_len=dst_item, **places)
    expected = [(BASE + i * 0x10000, 2 * BASE + i * 0x10000 + at, length) for i in (0, 1)]
    assert blocks(plan) == expected


HALVES = {"engine_rank": 0, "page_size": 4, "kv_head_num": 2, "prefill_start_layer": 0}


@pytest.mark.parametrize(
    ("item_lens", "attributes", "arguments", "message"),
    [
        ([128, 128], {}, {"dst_kv_item_len": 128}, "source item lengths must be 64 for 2 heads wh"),
        ([128, 128], {}, {"dst_kv_item_len": 250}, "a whole number of bytes for each of 4 tokens"),
        ([128, 64], {}, {}, r"must be 128 .* got 64 of entry 1"),  # V narrower than K
        ([128, 128], {}, {"attn_tp_size": 0}, "slice: attn_tp_size must be >= 1, got 0"),
        ([128, 128], {}, {"dst_attn_tp_size": 0}, "slice: dst_attn_tp_size must be >= 1, got 0"),
        ([128, 128], {"page_size": 2**62}, {"compat": True}, "page_size must fit into int32, got"),
        ([128, 128], {"page_size": 0}, {}, "page_size must be >= 1, got 0"),
        ([128, 128], {"kv_data_lens": [128, 127]}, {}, "within the 0 items of entry 1, got 0"),
    ],
)
def test_slices_refuse(item_lens, attributes, arguments, message):
    args = slice_args(2, 128, **HALVES | attributes)
    args.kv_item_lens = item_lens
    with pytest.raises(ValueError, match=message):
        slice_plan(args, 2, **{"dst_kv_item_len": 256} | arguments)


@pytest.mark.parametrize("rank", [-1, 4])
def test_ranks_outside_of_the_destination_are_refused(rank):
    sizes = {"prefill_tp_size": 2, "prefill_rank": 0, "decode_tp_size": 4, "decode_rank": rank}
    with pytest.raises(ValueError, match=f"destination rank must be within its 4 .* {rank}"):
        slice_heads(8, **sizes)


@pytest.mark.parametrize(("pp_size", "compat"), [(1, True), (2, True), (3, True), (2, False)])
def test_slices_of_a_stage_go_to_its_layers(pp_size, compat):
    """The stage is the second of three layers; with compat one stage will do, as in engines."""
    args = slice_args(
        2, 32, total_kv_head_num=2, prefill_start_layer=1, total_kv_layers=3, kv_buf_groups=1
    )
    plan = slice_plan(args, 6, pp_size=pp_size, compat=compat)
    assert [dst for _, dst, _ in blocks(plan)] == [
        2 * BASE + 0x10000 + 32,
        2 * BASE + 4 * 0x10000 + 32,
    ]
