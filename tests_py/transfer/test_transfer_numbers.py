# SPDX-License-Identifier: Apache-2.0
"""Numbers at the ends of their types: every answer is right, or it is an error that names them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import cpattn
from cpattn.transfer import KVEntry, KVLayout, LocalEngine, plan_kv_transfer


def args_of(item_len, addrs, **fields):
    return SimpleNamespace(kv_data_ptrs=addrs, kv_item_lens=[item_len] * len(addrs), **fields)


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
        size=0, page_size=1, num_layers=1, num_kv_heads=2**30, head_dim=2**10, dtype="float32"
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
