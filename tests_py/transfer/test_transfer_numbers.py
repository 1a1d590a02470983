# SPDX-License-Identifier: Apache-2.0
"""Numbers at the ends of their types: every answer is right, or it is an error that names them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

import cpattn
from cpattn.transfer import KVEntry, KVLayout, LocalEngine, plan_kv_links, plan_kv_transfer

EDGES = [
    0, 1, 2, 3, 7, 8, 64, 2**16, 2**31 - 1, 2**31, 2**32, 2**47, 2**48, 2**48 + 1, 2**53, 2**62,
    2**62 + 2**40, 2**63 - 8, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1, 2**64, 2**65, -1, -8,
    -(2**31), -(2**63), -(2**63) - 1,
]  # fmt: skip


def args_of(item_len, addrs, data_len=None, **fields):
    lens = {} if data_len is None else {"kv_data_lens": [data_len] * len(addrs)}
    return SimpleNamespace(
        kv_data_ptrs=addrs, kv_item_lens=[item_len] * len(addrs), **lens, **fields
    )


# --- right, although numbers are large ----------------------------------------------------------


def test_the_last_pages_of_the_address_space():
    top = 2**64 - 16 * 512
    layout = KVLayout([KVEntry(0, "k", False, top, 16 * 512, 512)], 8)
    plan = plan_kv_transfer(layout, layout, [15, 0], [14, 15])
    assert plan.src_addrs.tolist() == [2**64 - 512, top]
    assert plan.dst_addrs.tolist() == [2**64 - 1024, 2**64 - 512]


def test_pages_of_half_the_address_space():
    item = 2**62
    layout = KVLayout([KVEntry(0, "k", False, 2**63, 2**63 - 2**62, item)], 2**31 - 1)
    plan = plan_kv_transfer(layout, layout, [0], [0])
    assert plan.lengths.tolist() == [item]
    plan = cpattn.transfer.plan_send_kvcache(
        args_of(2**62, [0]), [2**62], [2], [1], pp_size=1, is_mla=True
    )
    assert plan.src_addrs.tolist() == [2 * 2**62]
    assert plan.dst_addrs.tolist() == [2 * 2**62]


def test_page_ids_near_the_end_of_their_type():
    with pytest.raises(ValueError, match=r"source item 9223372036854775807 of entry 0 lies beyond"):
        cpattn.transfer.plan_send_kvcache(
            args_of(4, [0]), [0], [2**63 - 1], [0], pp_size=1, is_mla=True
        )
    plan = cpattn.transfer.plan_send_kvcache(
        args_of(1, [8]), [0], [2**63 - 1], [0], pp_size=1, is_mla=True
    )
    assert plan.src_addrs.tolist() == [2**63 + 7]
    layout = KVLayout([KVEntry(0, "k", False, 0, 2**63 - 1, 1)], 1)
    plan = plan_kv_transfer(layout, layout, [2**63 - 2], [0])
    assert plan.src_addrs.tolist() == [2**63 - 2]
    with pytest.raises(ValueError, match=r"source pages must be in \[0, 9223372036854775807\) "):
        plan_kv_transfer(layout, layout, [2**63 - 1], [0])


# --- refused, where sums or products would wrap -------------------------------------------------


def test_a_slice_of_more_blocks_than_memory():
    """Tokens are sent one by one here: 2**31 of a page, of 2**13 pages, of 2**20 buffers."""
    page = 2**31 - 1
    args = args_of(2 * page, list(range(2**10)), engine_rank=0, page_size=page, total_kv_head_num=2)
    message = r"TransferPlan: a plan must have at most 268435456 blocks, got "
    with pytest.raises(ValueError, match=message):
        cpattn.transfer.plan_send_kvcache_slice(
            args, list(range(2**10)), [0], [0],
            dst_tp_rank=0, dst_attn_tp_size=2, dst_kv_item_len=page, attn_tp_size=1,
        )  # fmt: skip
    src, dst = (
        KVLayout([KVEntry(0, "k", False, 0, heads * page, heads * page)], page, tp_size=3 - heads,
                 total_kv_heads=2)
        for heads in (2, 1)
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        plan_kv_transfer(src, dst, [0], [0])


def test_heads_whose_bytes_wrap():
    args = args_of(2**42, [0, 8], engine_rank=0, page_size=4, total_kv_head_num=2**62 + 2**40)
    with pytest.raises(ValueError, match="source items of 4611687117939015680 heads of 4 tok"):
        cpattn.transfer.plan_send_kvcache_slice(
            args, [0, 8], [0], [0], dst_tp_rank=0, dst_attn_tp_size=2**40,
            dst_kv_item_len=4 * (2**22 + 1), attn_tp_size=1,
        )  # fmt: skip


def test_stages_that_end_anywhere():
    args = args_of(8, [0, 8], prefill_start_layer=1, prefill_end_layer=-(2**63), total_kv_layers=4)
    message = "plan_send_kvcache: prefill_end_layer must fit into int32, got -9223372036854775808"
    with pytest.raises(ValueError, match=message):
        cpattn.transfer.plan_send_kvcache(args, list(range(8)), [0], [0], pp_size=2, is_mla=False)


def test_more_entries_than_memory():
    message = r"n_src and n_dst must be in \[0, 16777216\], got 1099511627776 and 1099511627776"
    with pytest.raises(ValueError, match=message):
        cpattn.transfer.build_transfer_entry_pairs(None, None, 2**40, 2**40)


def test_more_bytes_than_a_copy_counts():
    """Every block lies within registered memory, but together they would wrap."""
    pool = cpattn.kv.MHATokenToKVPool(
        size=0,
        page_size=1,
        num_layers=1,
        num_kv_heads=2**30,
        head_dim=2**10,
        dtype="float32",
        container="numpy",
    )
    (addr, _), (size, _), _ = pool.get_contiguous_buf_infos()
    with LocalEngine() as engine:
        assert engine.register([addr], [size]) == 0
        num_blocks = 2**63 // size
        blocks = [addr] * num_blocks, [addr] * num_blocks, [size] * num_blocks
        with pytest.raises(ValueError, match=r"copy_blocks: lengths must add up to less tha"):
            engine.write(engine.session_id, *blocks)
        lists = [column * 2 for column in blocks]
        with pytest.raises(ValueError, match=r"LocalEngine.write: lengths must add up to"):
            engine.write(engine.session_id, *lists)


# --- anything at all ----------------------------------------------------------------------------


def pair_of_layouts(draw):
    """Two layouts that fit together, but for a number here and there."""
    maybe = draw.maybe
    page_size = draw.random.choice([1, 2, 8, 2**31 - 1])
    item_len = page_size * draw.random.choice([1, 2, 16, 2**30])
    num_heads = draw.random.choice([1, 2])

    def layout(base, tp_size):
        entries = [
            KVEntry(maybe(3), kind, False, maybe(base + i * 2**62), maybe(item_len) * maybe(9),
                    maybe(item_len))
            for i, kind in enumerate("kv")
        ]  # fmt: skip
        return KVLayout(
            entries, maybe(page_size), tp_rank=maybe(0), tp_size=maybe(tp_size),
            total_kv_heads=maybe(num_heads), dcp_rank=maybe(0), dcp_size=maybe(1),
            dcp_interleave=maybe(1),
        )  # fmt: skip

    return layout(0, 1), layout(2**63, draw.random.choice([1, 1, num_heads]))


class Draw:
    """Mostly small numbers, so that calls come far, and some at the ends of types."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def __call__(self):
        return self.random.choice([0, 1, 1, 1, 2, 8] if self.random.random() < 0.9 else EDGES)

    def maybe(self, number):
        """The number, mostly."""
        return number if self.random.random() < 0.97 else self()

    def list(self):
        return [self() for _ in range(self.random.choice([0, 1, 1, 2, 5]))]


def calls(draw):
    addrs = draw.list()
    args = args_of(
        draw(), addrs, draw.random.choice([None, draw()]), engine_rank=draw(), page_size=draw(),
        total_kv_head_num=draw(), kv_head_num=draw(), prefill_start_layer=draw(),
        prefill_end_layer=draw(), kv_buf_groups=draw(), total_kv_layers=draw(),
        draft_kv_layers=draw(),
    )  # fmt: skip
    draw.compat = draw.random.random() < 0.3
    flags = {"is_last_rank": draw.random.random() < 0.5, "compat": draw.compat}
    send = addrs + draw.list(), draw.list(), draw.list()
    tokens = {
        name: draw()
        for name in ("num_tokens", "first_token", "src_start", "dst_start", "cp_size")
        if draw.random.random() < 0.2
    }
    pages = [[draw.maybe(page) for page in range(2)] for _ in range(2)]
    yield lambda: plan_kv_transfer(*pair_of_layouts(draw), *pages, cp_rank=draw.maybe(0), **tokens)
    yield lambda: plan_kv_links(
        *([layout] for layout in pair_of_layouts(draw)), *([side] for side in pages), **tokens
    )
    yield lambda: cpattn.transfer.plan_send_kvcache(
        args, *send, pp_size=draw(), is_mla=True, **flags
    )
    yield lambda: cpattn.transfer.plan_send_kvcache(
        args, *send, pp_size=draw(), is_mla=False, **flags
    )
    yield lambda: cpattn.transfer.plan_send_kvcache_slice(
        args, *send, dst_tp_rank=draw(), dst_attn_tp_size=draw(), dst_kv_item_len=draw(),
        attn_tp_size=draw(), pp_size=draw(), **flags,
    )  # fmt: skip
    yield lambda: cpattn.transfer.get_mha_kv_ptrs_with_pp(
        draw.list(), draw.list(), prefill_start_layer=draw(), total_kv_layers=draw(),
        compat=flags["compat"],
    )  # fmt: skip
    yield lambda: cpattn.transfer.get_mla_kv_ptrs_with_pp(
        draw.list(), draw.list(), prefill_start_layer=draw(), kv_buf_groups=draw(),
        total_kv_layers=draw(), hidden_kv_layers=draw.random.choice([None, draw()]),
        draft_kv_layers=draw(), **flags,
    )  # fmt: skip
    yield lambda: cpattn.transfer.slice_heads(
        draw(), prefill_tp_size=draw(), prefill_rank=draw(), decode_tp_size=draw(),
        decode_rank=draw(), compat=flags["compat"],
    )  # fmt: skip
    yield lambda: cpattn.transfer.decode_targets(
        draw(), prefill_tp_size=draw(), decode_tp_size=draw(), is_mla=flags["compat"]
    )
    yield lambda: cpattn.transfer.build_transfer_entry_pairs(
        draw.list(), draw.list(), draw(), draw()
    )
    yield lambda: cpattn.transfer.kv_to_page_indices(draw.list(), draw())
    yield lambda: cpattn.transfer.group_concurrent_contiguous(draw.list(), draw.list())
    yield lambda: cpattn.transfer.registration_regions(draw.list(), draw.list(), alignment=draw())
    yield lambda: cpattn.transfer.KVSendCursor(draw(), draw(), draw()).advance(
        draw(), last_chunk=True
    )


@pytest.mark.parametrize("seed", range(300))
def test_any_numbers_are_answered_or_refused(seed):
    """Blocks of strict plans never wrap: they lie between 0 and 2**64, as Python counts."""
    draw = Draw(seed)
    for call in calls(draw):
        try:
            result = call()
        except (ValueError, RuntimeError, IndexError):
            continue
        if isinstance(result, cpattn.transfer.TransferPlan) and not draw.compat:
            ends = [
                int(addr) + int(length)
                for addrs in (result.src_addrs, result.dst_addrs)
                for addr, length in zip(addrs, result.lengths, strict=True)
            ]
            assert np.all(result.lengths <= np.uint64(2**64 - 1))
            assert max(ends, default=0) <= 2**64
