# SPDX-License-Identifier: Apache-2.0
"""Pools that receive what senders plan: the item length is a page's in every layout."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cpattn.kv import MHATokenToKVPool, MLATokenToKVPool
from cpattn.transfer.sglang_0_5_23 import (
    KVArgs,
    fill_kv_args,
    plan_send_kvcache,
    setup_state_kv_args,
)
from support.transfer.plan_blocks import blocks


@pytest.mark.parametrize("use_fia", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_pools_receive_their_pages(use_fia, pp):
    """Bytes copied by the plan are the pages, and only these; with FIA as without (#15852)."""

    def pool(**layers):
        return MHATokenToKVPool(
            size=64, page_size=8, num_kv_heads=2, head_dim=4, v_head_dim=6, use_fia=use_fia,
            dtype="float32", container="numpy", **layers,
        )  # fmt: skip

    decode = pool(num_layers=3)
    src_pages, dst_pages = [1, 2, 5, 4], [3, 4, 8, 1]
    for first, end in ((0, 3),) if pp == 1 else ((0, 1), (1, 3)):
        stage = pool(num_layers=end - first, start_layer=first)
        for layer in range(first, end):
            stage.get_key_buffer(layer).flat = np.arange(9 * 64) + 1e4 * layer + 1
            stage.get_value_buffer(layer)[:] = -1 - layer
        args = KVArgs()
        fill_kv_args(args, stage, total_kv_layers=3)
        ptrs, _, _ = decode.get_contiguous_buf_infos()
        plan = plan_send_kvcache(args, ptrs, src_pages, dst_pages, pp_size=pp, is_mla=False)
        copy(plan)
        rest = [page for page in range(9) if page not in dst_pages]
        for layer in range(first, end):
            for get in ("get_key_buffer", "get_value_buffer"):
                there = getattr(decode, get)(layer).reshape(9, -1)
                here = getattr(stage, get)(layer).reshape(9, -1)
                assert np.array_equal(there[dst_pages], here[src_pages])
                assert not there[rest].any()


def copy(plan):
    for src, dst, length in blocks(plan):
        ctypes.memmove(dst, src, length)


def test_an_mla_stage_with_drafts_over_pools():
    def pools(num_layers, first=0):
        return [
            MLATokenToKVPool(
                size=32, page_size=4, kv_lora_rank=8, qk_rope_head_dim=4, index_head_dim=4,
                container="numpy", dtype="float32", num_layers=count, start_layer=start,
            )
            for count, start in ((num_layers, first), (1, 0))
        ]  # fmt: skip

    (stage, draft), (decode, decode_draft) = pools(2, 2), pools(4)
    buffers = stage.k_buffer, stage.v_buffer, stage.index_k_buffer, draft.k_buffer
    for value, buffer in enumerate((*buffers, draft.index_k_buffer), 1):
        buffer[:] = value
    sides = []
    for pool, drafts in ((stage, draft), (decode, decode_draft)):
        args = KVArgs()
        fill_kv_args(args, pool, drafts)
        setup_state_kv_args(args, pool, drafts, total_kv_layers=4)
        sides.append(args)
    plan = plan_send_kvcache(
        sides[0], sides[1].kv_data_ptrs, [3], [6], pp_size=2, is_mla=True, is_last_rank=True,
        dst_item_lens=sides[1].kv_item_lens,
    )  # fmt: skip
    copy(plan)
    for buffer, value, layers in (
        (decode.k_buffer, 1, [2, 3]),
        (decode.v_buffer, 2, [2, 3]),
        (decode.index_k_buffer, 3, [2, 3]),
        (decode_draft.k_buffer, 4, [0]),
        (decode_draft.index_k_buffer, 5, [0]),
    ):
        expected = np.zeros_like(buffer)
        expected[layers, 6] = value
        assert np.array_equal(buffer, expected)
