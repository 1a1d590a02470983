# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a server's pools, filled in the order of engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer.sglang_0_5_23 import KVArgs, fill_kv_args, setup_state_kv_args


def mla_pool(num_layers, *, index_head_dim=None, start_layer=0):
    return MLATokenToKVPool(
        size=64, page_size=8, num_layers=num_layers, kv_lora_rank=32, qk_rope_head_dim=16,
        index_head_dim=index_head_dim, start_layer=start_layer,
    )  # fmt: skip


def test_attributes_that_were_not_set_are_absent():
    args = KVArgs(engine_rank=1)
    args.page_size = 8
    assert not hasattr(args, "kv_buf_groups")
    with pytest.raises(AttributeError, match="total_kv_layers"):
        _ = args.total_kv_layers
    assert (args.dcp_size, args.dcp_rank, args.swa_page_size) == (1, 0, None)
    assert args == KVArgs(engine_rank=1, page_size=8)
    assert args != KVArgs(engine_rank=1)


def test_the_repr_is_short():
    args = KVArgs(kv_data_ptrs=[*range(5)], state_data_ptrs=[[1, 2]], kv_item_lens=[1, 2, 3, 4])
    assert repr(args) == (
        "KVArgs(kv_data_ptrs=[0, 1, 2, 3, ... 5 in all], state_data_ptrs=[[1, 2]], "
        "kv_item_lens=[1, 2, 3, 4])"
    )


def test_draft_buffers_come_last():
    pool, draft = mla_pool(2, index_head_dim=8, start_layer=5), mla_pool(1, index_head_dim=8)
    args = KVArgs()
    fill_kv_args(args, pool, draft)
    infos = zip(pool.get_contiguous_buf_infos(), draft.get_contiguous_buf_infos(), strict=True)
    lists = [[*own, *extra] for own, extra in infos]
    assert [args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens] == lists
    # K0 K1 V0 V1 I0 I1 dK dV dI, of pages of 8 tokens in bfloat16
    assert args.kv_item_lens == [512, 512, 256, 256, 128, 128, 512, 256, 128]
    assert (args.page_size, args.prefill_start_layer, args.prefill_end_layer) == (8, 5, 7)
    assert not hasattr(args, "total_kv_layers")
    fill_kv_args(args, pool, total_kv_layers=9)
    assert args.kv_data_ptrs == pool.get_contiguous_buf_infos()[0]
    assert args.total_kv_layers == 9


@pytest.mark.parametrize("index_head_dim", [None, 8])
@pytest.mark.parametrize(("layers", "drafts"), [(3, 1), (2, 1), (4, 1), (1, 3), (2, 0), (0, 1)])
def test_drafts_of_thin_stages_are_no_groups(layers, drafts, index_head_dim):
    """Buffers divided by layers would count 4 groups for 3 layers of 3 groups and a draft."""
    pool = SimpleNamespace(
        index_head_dim=index_head_dim, layer_num=layers, get_state_buf_infos=lambda: ([], [], [])
    )
    draft = SimpleNamespace(layer_num=drafts) if drafts else None
    args = KVArgs(state_types=["swa"], state_data_ptrs=[[1]], kv_data_ptrs=[1])
    setup_state_kv_args(args, pool, draft, total_kv_layers=61)
    assert args.kv_buf_groups == (2 if index_head_dim is None else 3)
    assert (args.hidden_kv_layers, args.total_kv_layers) == (61, 61)
    assert args.draft_kv_layers == drafts
    lists = [value for name, value in vars(args).items() if name.startswith("state_")]
    assert lists == [[]] * 5


def test_pools_of_the_library():
    args = KVArgs()
    setup_state_kv_args(args, mla_pool(2, index_head_dim=8), mla_pool(1), total_kv_layers=4)
    assert (args.kv_buf_groups, args.hidden_kv_layers, args.draft_kv_layers) == (3, 4, 1)
    args = KVArgs(state_types=["swa"])
    mha = MHATokenToKVPool(size=64, page_size=8, num_layers=2, num_kv_heads=2, head_dim=8)
    setup_state_kv_args(args, mha, total_kv_layers=4)
    assert args.state_types == []
    assert not hasattr(args, "kv_buf_groups")
    assert not hasattr(args, "total_kv_layers")
