# SPDX-License-Identifier: Apache-2.0
"""Senders send the blocks of engines, by plain restatements of their rules. Heads go between ranks
of unequal tensor parallelism; fleets send them token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import (
    KVArgs,
    plan_send_kvcache,
    plan_send_kvcache_slice,
    slice_heads,
)
from support.transfer.plan_blocks import blocks

BASE = 1 << 48


def server(groups, first, end, drafts, *, base, **fields):
    """Return arguments of a server whose groups differ in item length, and the entries' names."""
    names = [f"{g}{i}" for g in groups for i in range(first, end)]
    names += [f"d{g}{k}" for g in groups for k in range(drafts)]
    items = [32 << groups.index(name.lstrip("d")[0]) for name in names]
    args = KVArgs(
        kv_data_ptrs=[base + i * 0x1_0000_0000 for i in range(len(names))], kv_item_lens=items,
        kv_data_lens=[100 * item for item in items], prefill_start_layer=first,
        kv_buf_groups=len(groups), **fields,
    )  # fmt: skip
    return args, names


def test_drafts_of_the_last_stage_are_no_layers_of_it():
    known = {"hidden_kv_layers": 4, "draft_kv_layers": 1, "prefill_end_layer": 4}
    args, _ = server("KVI", 2, 4, 1, base=BASE, **known)
    ptrs = server("KVI", 0, 4, 1, base=2 * BASE)[0].kv_data_ptrs
    plan = plan_send_kvcache(args, ptrs, [0], [0], pp_size=2, is_mla=True, is_last_rank=True)
    assert [ptrs.index(addr) for addr in plan.dst_addrs] == [2, 3, 6, 7, 10, 11, 12, 13, 14]


def test_none_is_absent():
    names = ("kv_data_lens", "kv_buf_groups", "total_kv_layers", "hidden_kv_layers",
             "draft_kv_layers", "prefill_end_layer")  # fmt: skip
    args = KVArgs(kv_data_ptrs=[1000], kv_item_lens=[10], prefill_start_layer=0)
    plans = []
    for _ in range(2):
        plans.append(plan_send_kvcache(args, [5000], [1], [2], pp_size=2, is_mla=True))
        vars(args).update(dict.fromkeys(names))
    assert blocks(plans[0]) == blocks(plans[1]) == [(1010, 5020, 10)]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32])
def test_lists_in_arrays(dtype):
    args = KVArgs(kv_data_ptrs=np.array([1000, 2000], dtype),
                  kv_item_lens=torch.tensor([10, 20]))  # fmt: skip
    plan = plan_send_kvcache(args, np.array([5000, 6000], dtype), [1], [2], pp_size=1, is_mla=True)
    assert blocks(plan) == [(1010, 5020, 10), (2020, 6040, 20)]
    for ptrs, error in (([-1, 0], ValueError), ([1.0, 2.0], TypeError)):
        args.kv_data_ptrs = np.array(ptrs)
        with pytest.raises(error, match="source addresses must "):
            plan_send_kvcache(args, [5, 6], [1], [2], pp_size=1, is_mla=True)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("is_mla", [False, True])
def test_a_short_destination(pp_size, is_mla):
    args, _ = server("KV", 2, 4, 0, base=BASE, total_kv_layers=3)
    short = [2 * BASE + i for i in range(3)]
    for compat, error in ((False, ValueError), (True, IndexError)):
        with pytest.raises(error, match="plan_send_kvcache: "):
            plan_send_kvcache(args, short, [0], [0], pp_size=pp_size, is_mla=is_mla, compat=compat)


ARGS = {
    "kv_data_ptrs": [BASE, BASE + 0x10000], "kv_data_lens": [900, 1800], "kv_item_lens": [100, 200],
    "prefill_start_layer": 0,
}  # fmt: skip
EQUAL = "group_concurrent_contiguous requires equal-length src/dst index arrays, got 1 and 2"
OTHER = {"dst_item_lens": [100, 50]}


@pytest.mark.parametrize(
    ("changed", "src", "dst", "options", "message"),
    [
        ({}, [9], [0], {}, "source indices must be within the 9 items of entry 0, got 9"),
        ({"kv_data_lens": [900, 1799]}, [8], [0], {}, "within the 8 items of entry 1, got 8"),
        ({}, [0, -1], [0, 1], {}, "source indices must be >= 0, got -1 at index 1"),
        ({}, [0, 1], [-5, 1], {}, "destination indices must be >= 0, got -5 at index 0"),
        ({"kv_data_ptrs": [-1, 0]}, [0], [0], {}, r"source addresses must be in \[0, 2\^64\), got"),
        ({}, [0], [0], OTHER, "got 200 of source entry 1 and 50 of destination entry 1"),
        ({}, [0], [0], {"pp_size": 0}, "pp_size must be >= 1, got 0"),
        ({"kv_buf_groups": 0}, [0], [0], {}, "kv_buf_groups must be >= 1, got 0"),
        (
            {"kv_buf_groups": 0},
            [0],
            [0],
            {"pp_size": 2, "compat": True},
            "kv_buf_groups must be >= 1",
        ),
        ({}, [1], [1, 2], {}, EQUAL),
        ({}, [1], [1, 2], {"compat": True}, EQUAL),
    ],
)
def test_refuses(changed, src, dst, options, message):
    args = KVArgs(**{**ARGS, **changed})
    options = {"pp_size": 1, "is_mla": True} | options
    with pytest.raises(ValueError, match=f"^plan_send_kvcache: .*{message}|^{message}"):
        plan_send_kvcache(args, [2 * BASE, 3 * BASE], src, dst, **options)


@pytest.mark.parametrize("compat", [False, True])
def test_a_stage_must_say_where_it_begins(compat):
    args, _ = server("KV", 2, 4, 0, base=BASE, total_kv_layers=4)
    del args.prefill_start_layer
    with pytest.raises(TypeError, match="plan_send_kvcache: kv_args must have prefill_start_layer"):
        plan_send_kvcache(args, list(range(8)), [0], [0], pp_size=2, is_mla=True, compat=compat)


def test_compat_takes_the_item_length_of_the_source():
    """The source's length is used for both sides, without a check."""
    send = KVArgs(**ARGS), [2 * BASE, 3 * BASE], [0], [0]
    plan = plan_send_kvcache(*send, pp_size=1, is_mla=True, compat=True, **OTHER)
    assert blocks(plan)[1] == (BASE + 0x10000, 3 * BASE, 200)


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
    """Return the pairs of source and destination entries that a plan of one page joins."""
    pairs = [((src - SRC) // STEP, (dst - DST) // STEP) for src, dst, _ in blocks(plan)]
    return list(dict.fromkeys(pairs))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True), st.data(), st.booleans())
def test_stages_of_hybrid_models_reach_their_layers(layers, data, compat):
    """#32270 counted layers that attend by ordinal, so a stage met the layers of another one."""
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
    # A row has the ids of both sides, options, and pairs of entries.
    ([4, 7], [7, 4], {"src_lens": [64, 96], "dst_item_lens": [96, 64]}, [(0, 1), (1, 0)]),
    # Engines send half a layer alone, and leave out entries without a length.
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
        ({"kv_head_num": 3}, 24, 48, 24, 24),  # heads of a rank times ranks
        *(({"kv_head_num": 3, "total_kv_head_num": n}, 24, 48, 24, 24) for n in (None, 0, -1)),
        ({"kv_head_num": 1, "total_kv_head_num": 1}, 64, 64, 0, 64),  # every rank holds it
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
        ([128, 64], {}, {}, r"must be 128 .* got 64 of entry 1"),  # V is narrower than K
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
    """The stage has the second of three layers; with compat pp_size may be 1, as in engines."""
    args = slice_args(
        2, 32, total_kv_head_num=2, prefill_start_layer=1, total_kv_layers=3, kv_buf_groups=1
    )
    plan = slice_plan(args, 6, pp_size=pp_size, compat=compat)
    assert [dst for _, dst, _ in blocks(plan)] == [
        2 * BASE + 0x10000 + 32,
        2 * BASE + 4 * 0x10000 + 32,
    ]
