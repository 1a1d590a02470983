# SPDX-License-Identifier: Apache-2.0
"""Decode steps whose partial results travel by heads have the bits of those where all travel."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from cpattn.distributed import ContextParallel
from support.cases import assert_attention, expected_attention
from support.distributed import decode_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.sharded_worker import PLACEMENTS, Step

STEPS = [
    Step("one token each", (9, 1, 200, 64), (1, 1, 1, 1)),
    Step("drafts", (9, 5, 70, 33), (4, 5, 3, 1), num_heads=8, num_kv_heads=4),
    Step("nothing new", (9, 40), (0, 0)),
    Step("bfloat16", (150, 33), (1, 3), dtype=torch.bfloat16),
    Step("fewer heads than ranks", (50, 33), (1, 3), num_heads=2, num_kv_heads=1),
    Step("one head", (50, 33), (1, 3), num_heads=1, num_kv_heads=1),
    Step("latents", (50, 33), (1, 3), latent=True, options=(("scale", 0.3),)),
    Step("window, sinks", (90, 40), (2, 3), options=(("window", 11), ("sinks", True))),
    Step("tree of drafts", (29, 40), (7, 5), masked=True, num_heads=7, num_kv_heads=7),
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def ways(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("ways"), worker.run_ways, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_way_has_the_same_bits(ways, step, placement):
    reference = ways[0][placement, step.name]["gather", "all", "all"]
    if sum(step.q_lens):
        inputs = step.inputs()
        expected = expected_attention(inputs)
        assert_attention(*reference, inputs, op="ring of ranks", expected=expected)
    bounds = [step.num_heads * rank // len(ways) for rank in range(len(ways) + 1)]
    for rank, answer in enumerate(ways):
        for (exchange, out_heads, queries), result in answer[placement, step.name].items():
            heads = slice(bounds[rank], bounds[rank + 1]) if out_heads == "own" else slice(None)
            for ours, whole in zip(result, reference, strict=True):
                assert ours.is_contiguous()
                assert torch.equal(ours, whole[:, heads]), (exchange, out_heads, queries)


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def received(request, tmp_path_factory):
    step = Step("traffic", (90, 40), (3, 5), num_heads=12)
    return run_world(request.param, tmp_path_factory.mktemp("traffic"), worker.run_received, step)


@pytest.mark.slow
@pytest.mark.parametrize("out_heads", worker.OUT_HEADS)
def test_what_travels_is_what_the_choice_goes_by(received, out_heads):
    for exchange in worker.STATE_EXCHANGES:
        most = max(answer[exchange, out_heads][0] for answer in received)
        assert most == received[0][exchange, out_heads][1]
    by_gather, by_heads = (received[0][name, out_heads] for name in worker.STATE_EXCHANGES)
    assert by_heads[2] == (2 if out_heads == "all" else 1)  # rounds
    assert by_gather[2] == 1
    assert by_heads[3] == ("gather" if out_heads == "all" else "all_to_all")


@pytest.mark.slow
def test_states_by_heads_are_a_share_of_those_of_all(tmp_path):
    step = Step("even", (90, 40), (3, 5), num_heads=8)
    for answer in run_world(4, tmp_path, worker.run_received, step):
        everything = answer["gather", "all"][0]
        assert answer["all_to_all", "own"][0] == everything // 4
        assert answer["all_to_all", "all"][0] == everything // 2


@pytest.mark.slow
def test_ranks_that_ask_for_other_heads_are_told(tmp_path):
    for rank, told in enumerate(run_world(3, tmp_path, worker.run_disagreements)):
        for name in ("exchange", "out_heads", "num_heads"):
            expected = "ContextParallel.decode: exchange of rank 1 differs from rank 0"
            assert told[name] == f"RuntimeError: {expected}; nothing was sent"
        if rank == 1:
            assert told["unknown"].startswith("ValueError: ContextParallel.decode: exchange must")
        else:
            assert "rank 1 refused its arguments" in told["unknown"]
        assert told["at last"] == "[2, 4, 32]"


@pytest.fixture(scope="module")
def cp(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=1))
    yield ContextParallel(dist.group.WORLD, page_size=4, placement=PLACEMENTS["pages"](1, 4))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "ring"}, "exchange must be one of auto, gather, all_to_all, got 'ring'"),
        ({"out_heads": "mine"}, "out_heads must be one of all, own, got 'mine'"),
        ({"num_heads": 8}, r"q must be \[num_tokens, 8, head_dim\] of rank 0, for 8 heads on 1"),
        ({"num_heads": 0}, "num_heads must be >= 1, got 0"),
        (
            {"num_heads": 4, "q_rope": torch.zeros(2, 3, 16), "k_rope": torch.zeros(40, 2, 16)},
            r"q_rope must be \[num_tokens, 4, head_dim\] of rank 0, for 4 heads on 1 ranks, got",
        ),
        (
            {"num_heads": 4, "q_rope": torch.zeros(3, 4, 16), "k_rope": torch.zeros(40, 2, 16)},
            "q_rope must have the 2 rows of the plan, got 3",
        ),
    ],
)
def test_decode_refuses(cp, options, message):
    plan = cp.plan_decode([9, 6], block_tables=[[5, 3, 9], [2, 7, 0]])
    pools = torch.zeros(40, 2, 32), torch.zeros(40, 2, 32)
    with pytest.raises(ValueError, match=f"^ContextParallel.decode: {message}"):
        cp.decode(plan, torch.zeros(2, 4, 32), *pools, **options)


def test_heads_of_a_rank_are_asked_for_by_their_number(cp):
    assert cp.head_range(7) == slice(0, 7)
    with pytest.raises(ValueError, match=r"^ContextParallel.head_range: num_heads must be >= 1"):
        cp.head_range(0)
    with pytest.raises(TypeError, match="num_heads must be an integer"):
        cp.head_range("4")


def choice_of_eight_ranks(num_requests, **options):
    """Planning needs no group."""
    cp = object.__new__(ContextParallel)
    cp.cp_rank, cp.cp_size, cp.page_size = 0, 8, 16
    cp.placement = PLACEMENTS["tokens"](8, 16)
    plan = cp.plan_decode(
        [40] * num_requests, block_tables=torch.arange(3 * num_requests).view(-1, 3)
    )
    return cp.choose_exchange(plan, num_heads=32, num_kv_heads=8, head_dim=128, **options)


def test_auto_is_by_heads_where_that_saves_more_than_a_round():
    state = 32 * (128 * 2 + 4)
    few, many = choice_of_eight_ranks(4), choice_of_eight_ranks(64)
    assert few.received_bytes == {"gather": 7 * 4 * state, "all_to_all": 2 * 7 * 4 * state // 8}
    assert few.exchange == "gather"
    assert "all_to_all takes a second round, which is worth 262144 bytes" in few.reason
    assert many.exchange == "all_to_all"
    assert f"at most {many.received_bytes['all_to_all']} bytes, by gather" in many.reason
    own = choice_of_eight_ranks(4, out_heads="own")
    assert own.exchange == "all_to_all"
    assert own.received_bytes["all_to_all"] == 7 * 4 * state // 8
    assert "round" not in own.reason


def test_choices_of_a_step_know_which_heads_are_wanted(cp):
    plan = cp.plan_decode([9, 6], block_tables=[[5, 3, 9], [2, 7, 0]])
    layer = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    choice = cp.choose_exchange(plan, **layer, out_heads="own")
    assert choice.exchange == "gather"  # nothing travels in a group of one
    assert choice.received_bytes == {"gather": 0, "all_to_all": 0}
    with pytest.raises(ValueError, match="out_heads must be one of all, own, got 'some'"):
        cp.choose_exchange(plan, **layer, out_heads="some")
