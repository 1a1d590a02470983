# SPDX-License-Identifier: Apache-2.0
"""plan_kv_transfer on small cases that can be read."""

from __future__ import annotations

import ctypes
import mmap
import re

import numpy as np
import pytest

from cpattn.kv import MHATokenToKVPool
from cpattn.transfer import KVEntry, KVLayout, plan_kv_transfer
from support.transfer.plan_blocks import blocks

PAGES = 64
MAP_NORESERVE = 0x4000  # the mmap module has no name for it before Python 3.13


def layout(base, *, ids=range(2), kinds=("k", "v"), lengths=(512, 128), draft=0, page_size=16,
           **placement):  # fmt: skip
    """Groups of layers, then groups of draft layers, 1 MiB apart."""
    entries = []
    for is_draft, layers in ((False, ids), (True, range(draft))):
        for kind, length in zip(kinds, lengths, strict=False):
            for layer in layers:
                addr = base + (len(entries) << 20)
                entries.append(KVEntry(layer, kind, is_draft, addr, PAGES * length, length))
    return KVLayout(entries, page_size, **placement)


SRC, DST = 1 << 48, 1 << 49


def test_entry_major_blocks_of_the_fewest_runs():
    """Runs join across the order of the request where both sides are consecutive."""
    plan = plan_kv_transfer(layout(SRC), layout(DST), [7, 2, 3, 8], [41, 20, 21, 42])
    expected = [
        (SRC + (entry << 20) + src * item, DST + (entry << 20) + dst * item, 2 * item)
        for entry, item in enumerate((512, 512, 128, 128))
        for src, dst in ((2, 20), (7, 41))
    ]
    assert blocks(plan) == expected


@pytest.mark.parametrize("dtype", [list, np.int32, np.int64])
def test_page_lists_of_every_kind(dtype):
    pages = [[3, 4, 9], [0, 1, 2]]
    lists = pages if dtype is list else np.array(pages, dtype)
    assert plan_kv_transfer(layout(SRC), layout(DST), *lists) == plan_kv_transfer(
        layout(SRC), layout(DST), *pages
    )


@pytest.mark.parametrize(
    ("changes", "pages", "message"),
    [
        ({"ids": [0]}, None, "source has k of layer 1 (item_len 512), which destination has not"),
        ({"ids": [0, 1, 2]}, None, "destination has k of layer 2 (item_len 512), which source"),
        ({"kinds": ["k"]}, None, "source has v of layer 0 (item_len 128), which destination has"),
        ({"kinds": ["k", "v", "index_k"], "lengths": [512, 128, 32]}, None,
         "destination has index_k of layer 0 (item_len 32), which source has not"),
        ({"lengths": [512, 64]}, None, "v of layer 0 must have the same bytes for each token and "
         "head on both sides, got item_len 128 for page_size 16 and 1 head(s) at the source, and "
         "64 for 16 and 1 at the destination"),
        ({}, ([1], [2, 3]), "num_tokens must be given where the pages of both sides do not end at "
         "one token, got 1 of 16 at the source, ending at 16, and 2 of 16 at the destination, "
         "ending at 32"),
        ({}, ([1, 2], [3, 3]), "destination pages must be distinct, got page 3 for two parts"),
        ({}, ([1, -1], [3, 4]), "source pages must be in [0, 64) for k of layer 0, got -1 at"),
        ({}, ([1], [64]), "destination pages must be in [0, 64) for k of layer 0, got 64 at"),
    ],
)  # fmt: skip
def test_refused(changes, pages, message):
    with pytest.raises(ValueError, match=f"^plan_kv_transfer: {re.escape(message)}"):
        plan_kv_transfer(layout(SRC), layout(DST, **changes), *(pages or ([1], [2])))


def test_refused_links():
    """What no other link could repair."""
    near = [KVEntry(i, "k", False, DST + i * 511, 512, 512) for i in range(2)]
    far = [KVEntry(i, "k", False, SRC + i * 512, 512, 512) for i in range(2)]
    with pytest.raises(ValueError, match="destination buffers must not overlap, got k of layer 0"):
        plan_kv_transfer(KVLayout(far, 16), KVLayout(near, 16), [0], [0])
    with pytest.raises(ValueError, match="total_kv_heads must be the same on both sides, got 4 at"):
        plan_kv_transfer(
            layout(SRC, tp_size=2, total_kv_heads=4), layout(DST, total_kv_heads=2), [0], [0]
        )
    with pytest.raises(ValueError, match="source must hold all tokens of its pages, got dcp_size"):
        plan_kv_transfer(layout(SRC, dcp_size=2), layout(DST), [0], [0])


@pytest.mark.parametrize(
    "arguments",
    [
        {"first_token": 16},  # over the prefix
        {"first_token": 12, "num_tokens": 8},  # rows of a page that the other part leaves alone
        {"cp_size": 2},  # the other rank's
    ],
)
def test_a_page_twice_is_refused_whatever_of_it_is_sent(arguments):
    with pytest.raises(ValueError, match="destination pages must be distinct, got page 3 for two"):
        plan_kv_transfer(layout(SRC), layout(DST), [1, 2], [3, 3], **arguments)


def test_pages_that_are_not_written_may_repeat():
    """The dummy page, in the place of pages outside an attention window, and behind the end."""
    pages = [1, 2, 3, 4, 5]
    plan = plan_kv_transfer(
        layout(SRC), layout(DST), pages, [0, 0, 7, 0, 0], first_token=32, num_tokens=16
    )
    assert plan == plan_kv_transfer(layout(SRC), layout(DST), [3], [7])


def test_draft_layers_of_both_sides_must_be_the_same():
    message = re.escape("destination has k of draft layer 1 (item_len 512), which source has not")
    with pytest.raises(ValueError, match=f"{message}$"):
        plan_kv_transfer(layout(SRC, draft=1), layout(DST, draft=2), [0], [0])
    plan = plan_kv_transfer(layout(SRC, draft=1), layout(DST), [0], [0])
    assert plan.parts == [("k", 2, 2), ("v", 2, 2)]


def test_buffers_of_a_source_may_be_shared():
    shared = [KVEntry(i, "k", False, SRC, 512, 512) for i in range(2)]
    apart = [KVEntry(i, "k", False, DST + i * 512, 512, 512) for i in range(2)]
    plan = plan_kv_transfer(KVLayout(shared, 16), KVLayout(apart, 16), [0], [0])
    assert blocks(plan) == [(SRC, DST, 512), (SRC, DST + 512, 512)]


def test_layers_of_other_links_are_left_out():
    src = layout(SRC, ids=range(2, 6), layers=(2, 6))
    dst = layout(DST, ids=range(4), layers=(0, 4))
    assert plan_kv_transfer(src, dst, [0], [0]).parts == [("k", 2, 2), ("v", 2, 2)]
    apart = layout(DST, ids=range(2), layers=(0, 2))
    assert len(plan_kv_transfer(src, apart, [0], [0])) == 0


# --- pages that are not rows of tokens: index keys with their scales behind ---------------------


def packed(base, **placement):
    """64 keys of 128 bytes, then 64 scales of 4 bytes."""
    entry = KVEntry(0, "index_k", False, base, 10 * 8448, 8448, token_rows=False)
    return KVLayout([entry], **({"page_size": 64} | placement))


def test_packed_pages_go_whole():
    plan = plan_kv_transfer(packed(SRC), packed(DST), [3, 4, 9], [1, 2, 5], num_tokens=129)
    assert blocks(plan) == [
        (SRC + 3 * 8448, DST + 8448, 2 * 8448),
        (SRC + 9 * 8448, DST + 5 * 8448, 8448),
    ]
    tail = plan_kv_transfer(packed(SRC), packed(DST), [3, 4], [1, 2], first_token=64)
    assert blocks(tail) == [(SRC + 4 * 8448, DST + 2 * 8448, 8448)]
    for rank in range(2):  # a latent that both have: each sends to its own
        ranks = {"tp_rank": rank, "tp_size": 2, "total_kv_heads": 1}
        assert len(plan_kv_transfer(packed(SRC, **ranks), packed(DST, **ranks), [3], [1])) == 1
    for rank in range(2):  # of interleaved pages
        dcp = {"dcp_rank": rank, "dcp_size": 2, "dcp_interleave": 128}
        plan = plan_kv_transfer(
            packed(SRC), packed(DST, **dcp), [0, 1, 2, 3], [5, 6], num_tokens=256
        )
        assert blocks(plan) == [(SRC + rank * 2 * 8448, DST + 5 * 8448, 2 * 8448)]


@pytest.mark.parametrize(
    ("dst", "arguments"),
    [
        ({}, {"first_token": 1}),
        ({"page_size": 16, "entry": {"item_len": 2112}}, {}),
        ({"dcp_size": 2}, {"num_tokens": 64}),
        ({"entry": {"token_rows": True}}, {}),
    ],
)
def test_parts_of_packed_pages_are_refused(dst, arguments):
    placement = {"page_size": 64} | dst
    changes = placement.pop("entry", {})
    entry = packed(DST).entries[0]._replace(nbytes=8448, **changes)
    to = KVLayout([entry], **placement)
    with pytest.raises(ValueError, match=r"index_k of layer 0 .*(whole pages|not rows of tokens)"):
        plan_kv_transfer(packed(SRC), to, [0], range_of_pages(to), **arguments)


def range_of_pages(layout):
    return list(range(64 // layout.page_size))


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 33}, "source pages must hold tokens [0, 33), got 2 of 16 from 0 on"),
        ({"num_tokens": -1}, "num_tokens must be in [0, 2^48], got -1"),
        ({"src_start": 8}, "src_start must be the first token of a page of 16, got 8"),
        ({"src_start": 16, "first_token": 0, "num_tokens": 1},
         "source pages must hold tokens [0, 1), got 2 of 16 from 16 on"),
        ({"first_token": 33}, "source pages must hold tokens [33, 32), got 2 of 16 from 0 on"),
        ({"dst_start": 16}, "num_tokens must be given where the pages of both sides do not end"),
        ({"first_token": 2**60}, "first_token must be in [0, 2^48], got 1152921504606846976"),
        ({"cp_rank": 1}, "cp_rank must be in [0, cp_size), got 1 of 1"),
        ({"cp_share": "heads"}, 'cp_share must be pages or layers, got "heads"'),
    ],
)  # fmt: skip
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"^plan_kv_transfer: {re.escape(message)}"):
        plan_kv_transfer(layout(SRC), layout(DST), [1, 2], [3, 4], **arguments)


def test_refused_arguments_of_a_dcp_rank():
    dst = layout(DST, dcp_size=2, dcp_interleave=4)
    with pytest.raises(ValueError, match="num_tokens must be given with dcp_size 2"):
        plan_kv_transfer(layout(SRC), dst, [1, 2], [3])
    with pytest.raises(ValueError, match="dst_start must be the first token of a page of 16 on ev"):
        plan_kv_transfer(layout(SRC), dst, [1, 2], [3], num_tokens=4, dst_start=16)
    with pytest.raises(ValueError, match="destination pages must hold tokens"):
        plan_kv_transfer(layout(SRC), dst, [1, 2, 3], [3], num_tokens=33)


@pytest.mark.parametrize("pages", [[1.0], [True], np.array([1.0])])
def test_page_lists_of_other_types(pages):
    with pytest.raises(TypeError, match=r"^plan_kv_transfer: src_pages must"):
        plan_kv_transfer(layout(SRC), layout(DST), pages, [1])


def test_cp_share_of_another_type():
    with pytest.raises(TypeError, match=r"^plan_kv_transfer: cp_share must be a str, got NoneType"):
        plan_kv_transfer(layout(SRC), layout(DST), [1], [1], cp_share=None)


def test_nothing_to_send():
    assert len(plan_kv_transfer(layout(SRC), layout(DST), [], [])) == 0
    assert len(plan_kv_transfer(layout(SRC), layout(DST), [1], [2], num_tokens=0)) == 0


# --- how many blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "num_runs"),
    [("contiguous", 1), ("reversed", 1), ("alternating", 7_500), ("random", 15_000)],
)
def test_scenario_62_descriptor_counts(order, num_runs):
    """15,000 pages. Random ones have a few neighbours by chance."""
    count = 15_000
    rng = np.random.default_rng(0)
    src, dst = np.arange(count), np.arange(count)
    if order == "reversed":
        src, dst = src[::-1].copy(), dst[::-1].copy()
    if order == "alternating":
        dst = (dst % 2) + 4 * (dst // 2)
    if order == "random":
        src, dst = rng.permutation(count), rng.permutation(count)
    entry = KVEntry(0, "k", False, SRC, 2 * count * 64, 64)
    sides = (KVLayout([entry._replace(addr=addr)], 1) for addr in (SRC, DST))
    plan = plan_kv_transfer(*sides, src, dst)
    assert plan.total_bytes == 64 * count
    src_of = np.empty(4 * count, np.int64)
    src_of[dst] = src
    apart = np.diff(src_of[np.sort(dst)]) != 1
    jumps = np.diff(np.sort(dst)) != 1
    assert len(plan) == 1 + (apart | jumps).sum()
    assert num_runs - 10 <= len(plan) <= num_runs


# --- large offsets -------------------------------------------------------------------------------


def test_offsets_beyond_32_bits_copied_in_sparse_memory():
    """Pages whose byte offsets pass 2^31 and 2^32, in address space of which little is used."""
    item_len, num_pages = 1 << 20, 5 << 10
    size = item_len * num_pages
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    maps = [mmap.mmap(-1, size, flags=flags) for _ in range(2)]
    arrays = [np.frombuffer(memory, np.uint8) for memory in maps]
    layouts = [
        KVLayout([KVEntry(0, "k", False, array.ctypes.data, size, item_len)], 16)
        for array in arrays
    ]
    src_pages = [2047, 2048, 4095, 4096, 5119]  # 2^31 and 2^32 bytes begin pages 2048 and 4096
    dst_pages = [4094, 4095, 1, 2, 4097]
    for number, page in enumerate(src_pages, 1):
        arrays[0][page * item_len] = arrays[0][(page + 1) * item_len - 1] = number
    plan = plan_kv_transfer(*layouts, src_pages, dst_pages)
    assert plan.lengths.tolist() == [2 * item_len, 2 * item_len, item_len]
    for src, dst, length in blocks(plan):
        ctypes.memmove(dst, src, length)
    for number, page in enumerate(dst_pages, 1):
        first, last = page * item_len, (page + 1) * item_len - 1
        assert arrays[1][first] == arrays[1][last] == number
        assert not arrays[1][first + 1 : last].any()
    assert not arrays[1][4098 * item_len]


def test_offsets_beyond_32_bits_of_tokens():
    """Rows of tokens and heads in buffers of 2^44 bytes behind 2^48."""
    entry = KVEntry(0, "k", False, SRC, 1 << 44, 1 << 20)
    src = KVLayout([entry], 16, total_kv_heads=2)
    dst = KVLayout(
        [entry._replace(addr=DST, item_len=1 << 19)], 16, tp_rank=1, tp_size=2, total_kv_heads=2
    )
    page, to = (1 << 24) - 1, (1 << 25) - 1
    plan = plan_kv_transfer(src, dst, [page], [to], first_token=15, num_tokens=1)
    row = 1 << 15
    expected = (SRC + (page * 16 + 15) * 2 * row + row, DST + (to * 16 + 15) * row, row)
    assert blocks(plan) == [expected]


# --- over the pools ------------------------------------------------------------------------------


@pytest.mark.parametrize("use_fia", [False, True])
@pytest.mark.parametrize("page_size", [16, 128])
def test_scenario_57_pages_of_pools_in_either_layout(use_fia, page_size):
    """A pool for the fused operator says one token where a page is meant, unless told (#15852)."""

    def pool(fia):
        return MHATokenToKVPool(
            size=5 * page_size, page_size=page_size, num_layers=2, num_kv_heads=2,
            head_dim=8, v_head_dim=4, dtype="float32", use_fia=fia, container="numpy",
        )  # fmt: skip

    src, dst = pool(use_fia), pool(not use_fia)
    rng = np.random.default_rng(0)
    num_tokens = 3 * page_size
    slots = np.concatenate([np.arange(page_size) + page_size * page for page in (4, 1, 2)])
    rows = [rng.random((num_tokens, 2, width), np.float32) for width in (8, 4)]
    for layer in range(2):
        src.set_kv_buffer(layer, slots, rows[0] + layer, rows[1] + layer)
    plan = plan_kv_transfer(KVLayout.from_pool(src), KVLayout.from_pool(dst), [4, 1, 2], [3, 4, 5])
    for from_, to, length in blocks(plan):
        ctypes.memmove(to, from_, length)
    for layer in range(2):
        for array, row in (
            (dst.get_key_buffer(layer), rows[0]),
            (dst.get_value_buffer(layer), rows[1]),
        ):
            flat = array.reshape(6 * page_size, *row.shape[1:])
            np.testing.assert_array_equal(flat[3 * page_size :], row + layer)
            assert not flat[: 3 * page_size].any()
