# SPDX-License-Identifier: Apache-2.0
"""Metadata and states of requests: items of buffers that pair by position."""

from __future__ import annotations

import numpy as np
import pytest

from cpattn.transfer.sglang_0_5_23 import KVArgs, plan_send_aux, plan_send_state
from support.transfer.plan_blocks import blocks

BASE = 1 << 48

AUX = KVArgs(aux_data_ptrs=[BASE, 2 * BASE], aux_item_lens=[64, 128], aux_data_lens=[640, 1280])


@pytest.mark.parametrize("compat", [False, True])
def test_aux(compat):
    plan = plan_send_aux(AUX, [3 * BASE, 4 * BASE], 2, 9, compat=compat)
    assert blocks(plan) == [
        (BASE + 128, 3 * BASE + 576, 64),
        (2 * BASE + 256, 4 * BASE + 1152, 128),
    ]


def test_aux_of_unequal_lists():
    for dst in ([3 * BASE], [3 * BASE] * 3):
        with pytest.raises(ValueError, match=f"got 2 of the source and {len(dst)} of the dest"):
            plan_send_aux(AUX, dst, 0, 0)
        assert len(plan_send_aux(AUX, dst, 0, 0, compat=True)) == min(len(dst), 2)
    for index, lens, message in [
        (10, None, "within the 10 items of entry 0, got 10"),
        (0, [64, 64], "got 128 of source entry 1 and 64 of destination"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan_send_aux(AUX, [3 * BASE] * 2, index, 0, dst_item_lens=lens)


STATES = KVArgs(
    state_types=["mamba", "swa"],
    state_data_ptrs=[[BASE, 2 * BASE], [3 * BASE]],
    state_item_lens=[[10, 20], [100]],
)
DST_STATES = [[4 * BASE, 5 * BASE], [6 * BASE]]


def test_states():
    plan = plan_send_state(STATES, DST_STATES, [[3], np.array([1, 2, 5])], [[4], [7, 8, 9]])
    assert blocks(plan) == [
        (BASE + 30, 4 * BASE + 40, 10),
        (2 * BASE + 60, 5 * BASE + 80, 20),
        (3 * BASE + 100, 6 * BASE + 700, 200),
        (3 * BASE + 500, 6 * BASE + 900, 100),
    ]
    assert len(plan_send_state(KVArgs(state_types=[], state_data_ptrs=[], state_item_lens=[]),
                               [], [], [])) == 0  # fmt: skip


def test_states_of_unequal_lists():
    for src, dst, message in [
        ([[3], [1, 2]], [[4], [7]], r"state indices must be as many.* got 2 .* and 1 "),
        ([[3], [1]], [[4], None], r"state indices must be as many.* got 1 .* and 0 "),
        ([[3, 4], [1]], [[4, 5], [7]], r"mamba states have one slot.* got 2 .* and 2 "),
        ([[3], [1]], [[4]], r"components must be as many .*'dst_state_indices': 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan_send_state(STATES, DST_STATES, src, dst)
    for name in ("state_data_ptrs", "state_item_lens", "state_data_lens"):
        short = KVArgs(**{**vars(STATES), name: [[10, 20]]})
        with pytest.raises(ValueError, match=f"components must be as many .*'{name}': 1"):
            plan_send_state(short, DST_STATES, [[3], [1]], [[4], [7]])
    plan = plan_send_state(STATES, DST_STATES, [[3], [1, 2]], [[4], [7]], compat=True)
    assert blocks(plan)[2:] == [(3 * BASE + 100, 6 * BASE + 700, 100)]
    assert len(plan_send_state(STATES, DST_STATES, [[3], [1]], [[4], None], compat=True)) == 2


def test_states_of_unequal_tensor_parallelism():
    sizes = {"attn_tp_size": 2, "dst_attn_tp_size": 4}
    states = [[3], [1]], [[4], [7]]
    with pytest.raises(RuntimeError, match=r"mamba states need equal tensor parallelism.* 2 and 4"):
        plan_send_state(STATES, DST_STATES, *states, **sizes, is_mla=True)
    paged = KVArgs(state_types=["dsa"], state_data_ptrs=[[BASE]], state_item_lens=[[8]])
    assert len(plan_send_state(paged, [[BASE]], [[1]], [[2]], **sizes, is_mla=True)) == 1
    with pytest.raises(RuntimeError, match="dsa states need equal tensor parallelism"):
        plan_send_state(paged, [[BASE]], [[1]], [[2]], **sizes)
