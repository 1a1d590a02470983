# SPDX-License-Identifier: Apache-2.0
"""Entries of metadata and states pair; a side may leave some out, and a rank have some pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpattn.transfer.sglang_0_5_23 import KVArgs, plan_send_aux, plan_send_state
from support.transfer.plan_blocks import blocks

SRC, DST = 1 << 40, 1 << 41


def send(src_lens, dst_lens, *, src=(1,), dst=(2,), kind="dsa", ids=(None, None), args=(), **more):
    """Plan one component; buffer i of a side begins i * 4096 bytes after its base."""
    src_ptrs, dst_ptrs = (
        [base + 4096 * i for i in range(len(lens))]
        for base, lens in ((SRC, src_lens), (DST, dst_lens))
    )
    kv_args = KVArgs(
        state_types=[kind], state_data_ptrs=[src_ptrs], state_item_lens=[list(src_lens)],
        state_layer_ids=[ids[0]], **dict(args),
    )  # fmt: skip
    options = {"dst_state_item_lens": [list(dst_lens)], "dst_state_layer_ids": [ids[1]]} | more
    return plan_send_state(kv_args, [dst_ptrs], [list(src)], [list(dst)], **options)


def pairs(plan, src_lens):
    """Return pairs (source entry, destination entry) of a plan from page 1 to page 2."""
    found = []
    for src, dst, length in blocks(plan):
        entry = (src - SRC) // 4096
        assert length == src_lens[entry] == src - SRC - 4096 * entry
        found.append((entry, (dst - 2 * length - DST) // 4096))
    return found


lengths = st.sampled_from([0, 8, 8, 16])


@given(st.data(), st.integers(1, 4), st.booleans())
def test_stages_and_layer_splits_cover_the_layers_of_the_model(data, num_ranks, compat):
    """Each rank publishes what it keeps; some layers have no index keys, the last rank drafts."""
    num_layers, num_drafts = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2))
    lens = [data.draw(lengths) for _ in range(num_layers)] + [8] * num_drafts
    cuts = sorted(data.draw(st.integers(0, num_layers)) for _ in range(num_ranks - 1))
    arrived = []
    for rank, (start, end) in enumerate(zip([0, *cuts], [*cuts, num_layers], strict=True)):
        own = lens[start : len(lens) if rank == num_ranks - 1 else end]
        stage = {"prefill_start_layer": start, "prefill_end_layer": end}
        plan = send(own, lens, args=stage, compat=compat)
        arrived += [dst for _, dst in pairs(plan, own)]
        assert all(dst == src + start for src, dst in pairs(plan, own))
    assert arrived == [i for i, item_len in enumerate(lens) if item_len]


@given(st.lists(st.integers(0, 60), unique=True, max_size=12), st.integers(2, 4))
def test_ranks_of_striped_pages_send_each_page_once(pages, size):
    targets = [100 + i for i in range(len(pages))]
    arrived = {}
    for rank in range(size):
        plan = send([8], [8], src=pages, dst=targets, kv_shard_rank=rank, kv_shard_size=size)
        for src, dst, length in blocks(plan):
            for i in range(length // 8):
                page = (dst - DST) // 8 + i
                assert page not in arrived
                arrived[page] = ((src - SRC) // 8 + i) * size + rank
    assert arrived == dict(zip(targets, pages, strict=True))


def test_striped_pages_of_state():
    shard = {"kv_shard_rank": 1, "kv_shard_size": 2}
    for compat in (False, True):
        with pytest.raises(ValueError, match=r"striped state pages must be as many .* got 2 .* 1 "):
            send([8], [8], src=[1, 2], dst=[1], **shard, compat=compat)
    # A rank that has no page of a component does not look at its lengths.
    assert len(send([8], [99], src=[2], dst=[1], **shard)) == 0
    with pytest.raises(ValueError, match=r"item lengths must be equal"):
        send([8], [99], src=[1], dst=[1], **shard)
    swa = send([8], [8], src=[3], dst=[4], kind="swa", **shard)
    assert blocks(swa) == [(SRC + 24, DST + 32, 8)], "only index keys are striped"
    cut = send([8], [8], src=[1, 2], dst=[7], compat=True)
    assert blocks(cut) == [(SRC + 8, DST + 56, 8)], "unstriped lists are cut"


LAST = {"prefill_start_layer": 2, "prefill_end_layer": 3}
FIRST = {"prefill_start_layer": 1}


def test_lists_of_other_lengths():
    for ids in (([5], None), (None, [5, 6])):
        assert pairs(send([8], [8, 9], ids=ids), [8]) == [(0, 0)]
    for kind in ("dsa", "swa"):  # latents are cut, heads are not
        assert pairs(send([8], [9, 8, 9], kind=kind, args=FIRST, is_mla=True), [8]) == [(0, 1)]
    assert len(send([8], [16], dst_state_item_lens=None)) == 1, "nobody said"
    assert len(send([8], [16], dst_state_item_lens=[None])) == 1
    assert pairs(send([8], [8] * 5, args=LAST), [8]) == [(0, 2)], "drafts of decode are left alone"
    # Engines give the first draft of decode to the first of prefill.
    assert pairs(send([8, 8], [8] * 5, args=LAST, compat=True), [8, 8]) == [(0, 2), (1, 3)]


BOTH = "requires layer ids on both peers; got src=2 dst=1"
REFUSALS = [
    ([8], [8, 9], {"ids": ([5], None), "pp_size": 2}, RuntimeError, "both PD peers or neither"),
    ([8], [8, 9], {"ids": (None, [5, 6]), "pp_size": 2}, RuntimeError, "both PD peers or neither"),
    ([8, 8], [8], {"ids": ([5, 6], None)}, RuntimeError, BOTH),
    ([8], [8], {"ids": ([7], [5])}, RuntimeError, "missing a transfer entry for model layer 7"),
    ([8, 8], [8, 8], {"ids": ([5], [5, 6])}, RuntimeError, "src metadata=1 entries=2, dst metadat"),
    # The next ones are refused even if a rank has nothing to send.
    ([8], [8], {"kv_shard_size": 0}, ValueError, "kv_shard_size must be >= 1, got 0"),
    ([8], [8], {"dst_state_layer_ids": [["a"]]}, TypeError, "dst_state_layer_ids"),
    ([8], [8], {"dst_state_item_lens": [[8]] * 2}, ValueError, "components must be as many .*: 2"),
    ([8], [8], {"args": {"prefill_start_layer": "1"}}, TypeError, "prefill_start_layer must be an"),
]


@pytest.mark.parametrize(("src", "dst", "options", "error", "rule"), REFUSALS)
def test_states_refused(src, dst, options, error, rule):
    with pytest.raises(error, match=rule):
        send(src, dst, **options)


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
