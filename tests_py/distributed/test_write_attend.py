# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel.attend` that writes new rows, too: the bits of `write_kv` and `attend`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from cpattn.distributed.layers.rounds import head_rounds, side_by_side
from cpattn.kv import PageInterleave
from support.distributed import write_attend_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.prefill_batches import Case

MIB = 1 << 20


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("world"), worker.run_all)


@pytest.mark.slow
def test_one_call_has_the_bits_of_two(answers):
    assert len(answers[0]) > 150
    for answer in answers:
        assert [name for name, same in answer.items() if not same] == []


@pytest.mark.slow
def test_what_one_call_gathers_is_what_a_rank_keeps(tmp_path):
    """A round is posted before the last one is waited for; new rows travel once."""
    case = Case("three heads", (13, 40), (64, 7), num_heads=6, num_kv_heads=3)
    ranks = run_world(2, tmp_path, worker.run_traffic, case)
    for answer in ranks:
        assert answer["events"] == ["post", "post", "finish", "post", "finish", "finish"]
    assert max(answer["received"] for answer in ranks) == ranks[0]["choice"]


@pytest.mark.parametrize(
    ("num_kv_heads", "received", "largest", "expected"),
    [
        (8, 32 * MIB, None, [1] * 8),
        (8, 32 * MIB, 3, [1] * 8),
        (32, 32 * MIB, None, [4] * 8),
        (32, 32 * MIB, 3, [3] * 10 + [2]),
        (8, 4 * MIB, None, [2] * 4),
        (8, MIB, None, [8]),
        (5, 4 * MIB, None, [2, 2, 1]),
        (1, 4 * MIB, 1, [1]),
    ],
)
def test_heads_go_in_rounds(num_kv_heads, received, largest, expected):
    rounds = head_rounds(num_kv_heads, received, 1000 * received, largest)
    assert [heads.stop - heads.start for heads in rounds] == expected
    assert [head for heads in rounds for head in range(heads.start, heads.stop)] == list(
        range(num_kv_heads)
    )


def test_what_computes_far_longer_than_it_receives_goes_at_once():
    assert head_rounds(8, 32 * MIB, 60_000 * 32 * MIB) == [slice(0, 8)]
    assert head_rounds(8, 32 * MIB, 60_000 * 32 * MIB, 4) == [slice(0, 4), slice(4, 8)]


def test_two_rounds_are_under_way_at_most():
    events = []
    heads = [slice(i, i + 1) for i in range(4)]

    def begin(which, buffer):
        events.append(f"begin {which.start} in {buffer}")
        return which

    def compute(which, arriving):
        assert arriving is which
        events.append(f"compute {which.start}")

    side_by_side(heads, begin, compute)
    assert events == [
        "begin 0 in 0", "begin 1 in 1", "compute 0", "begin 2 in 0", "compute 1", "begin 3 in 1",
        "compute 2", "compute 3",
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["replicated", "sharded"])
def cp(request):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    placement = PageInterleave(shard_size=1, page_size=4) if request.param == "sharded" else None
    yield ContextParallel(dist.group.WORLD, page_size=4, placement=placement)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_local": None}, "v_local must come with k_local, got none"),
        ({"v_local": None}, "v_local and v_(cache|shard) must be given together, got no v_local"),
        ({"k_local": torch.zeros(4, 1, 16)}, "k_local must have at least the 5 rows of rank 0"),
        ({"v_local": torch.zeros(5, 2, 16)}, r"v_(cache|shard) must be \[num_slots, num_kv_heads"),
        ({"k_local": torch.zeros(5, 1, 16).half()}, "k_(cache|shard) must be contiguous .*float16"),
        ({"q_local": torch.zeros(4, 2, 16)}, "q_local must have at least the 5 rows of rank 0"),
        ({"out": torch.zeros(5, 2, 8)}, r"out must be \[5, 2, 16\]"),
        (
            {"q_rope": torch.zeros(5, 2, 16), "k_rope": torch.zeros(12, 1, 16)},
            "k_local must be without k_rope",
        ),
        ({"window": -1}, "window"),
    ],
)
def test_what_is_refused_writes_nothing(cp, change, message):
    plan = cp.plan([5], [7], block_tables=[[2, 0]])
    caches = torch.ones(2, 12, 1, 16)
    arguments = {
        "q_local": torch.zeros(5, 2, 16),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "k_local": torch.zeros(5, 1, 16),
        "v_local": torch.zeros(5, 1, 16),
    }
    with pytest.raises(ValueError, match=message):
        cp.attend(plan, **(arguments | change))
    assert (caches == 1).all()


def test_pages_beyond_the_cache_are_refused_before_anything_is_written(cp):
    plan = cp.plan([2], [7], block_tables=[[9, 0]])
    caches = torch.ones(2, 12, 1, 16)
    new = torch.zeros(2, 1, 16)
    with pytest.raises(ValueError, match=r"block_tables|block tables"):
        cp.attend(plan, torch.zeros(2, 2, 16), *caches, k_local=new, v_local=new)
    assert (caches == 1).all()


@pytest.mark.parametrize("slots", [(13, 13), (12, 16), (12, 24)])
def test_caches_of_other_pages_are_refused_before_anything_is_written(cp, slots):
    replicated = ContextParallel(cp.group, page_size=4)
    plan = replicated.plan([5], [7], block_tables=[[2, 0]])
    caches = [torch.ones(n, 1, 16) for n in slots]
    new = torch.zeros(5, 1, 16)
    with pytest.raises(ValueError, match=r"k_cache and v_cache must have the same whole pages of "):
        replicated.attend(plan, torch.zeros(5, 2, 16), *caches, k_local=new, v_local=new)
    assert all((cache == 1).all() for cache in caches)


def test_what_is_no_plan_for_it_and_no_tensor_is_named(cp):
    placement = PageInterleave(shard_size=1, page_size=4)
    sharded = ContextParallel(dist.group.WORLD, page_size=4, placement=placement)
    decode = sharded.plan_decode([7], block_tables=[[2, 0]])
    q, caches = torch.zeros(1, 2, 16), torch.zeros(2, 12, 1, 16)
    with pytest.raises(
        TypeError, match=r"attend: plan must be one of ContextParallel\.plan, got D"
    ):
        cp.attend(decode, q, *caches)
    plan = cp.plan([5], [7], block_tables=[[2, 0]])
    with pytest.raises(
        TypeError, match=r"write_kv: k_(local|cache|shard) must be a tensor, got None"
    ):
        cp.write_kv(plan, None, None, caches[0], None)
