# SPDX-License-Identifier: Apache-2.0
"""Decode steps with partial results by heads have the bits of steps in which all travel."""

import pytest
import torch

from support.cases import assert_attention, expected_attention
from support.distributed import sharded_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.planning import first_of
from support.distributed.sharded_worker import PLACEMENTS, Step
from support.pairwise import pairwise

STEPS = [
    Step("one token each", (9, 1, 200, 64), (1, 1, 1, 1)),
    Step("drafts", (9, 5, 70, 33), (4, 5, 3, 1), num_heads=8, num_kv_heads=4),
    Step("idle request", (9, 40), (0, 2)),
    Step("nothing new", (9, 40), (0, 0)),
    Step("bfloat16", (150, 33), (1, 3), dtype=torch.bfloat16),
    Step("fewer heads than ranks", (50, 33), (1, 3), num_heads=2, num_kv_heads=1),
    Step("one head", (50, 33), (1, 3), num_heads=1, num_kv_heads=1),
    Step("latents", (50, 33), (1, 3), latent=True, options=(("scale", 0.3),)),
    Step("rotary keys apart", (50, 33), (1, 3), rope_apart=True),
    Step("latents, rotary keys apart", (50, 33), (1, 3), latent=True, rope_apart=True),
    Step("window, sinks", (90, 40), (2, 3), options=(("window", 11), ("sinks", True))),
    Step("sinks and softcap", (9, 40), (1, 2), options=(("sinks", True), ("softcap", 2.0))),
    Step("ALiBi", (90, 40), (2, 3), options=(("alibi_slopes", True), ("window", 30))),
    Step("bias", (90, 40), (2, 3), options=(("bias", True), ("softcap", 2.0))),
    Step("tree of drafts", (29, 40), (7, 5), masked=True, num_heads=7, num_kv_heads=7),
]
RUNS = pairwise(STEPS, [*PLACEMENTS])
TRAFFIC = Step("traffic", (90, 40), (3, 5), num_heads=12)


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format
)
def answers(request, tmp_path_factory):
    """Return results by every way, and the traffic, of each rank."""
    path = tmp_path_factory.mktemp("world")
    return [*zip(*run_world(request.param, path, worker.run_decode, RUNS, TRAFFIC), strict=True)]


@pytest.mark.parametrize(("step", "placement"), RUNS, ids=lambda x: getattr(x, "name", x))
def test_every_way_has_the_same_bits(answers, step, placement):
    ways, _ = answers
    reference = ways[0][step, placement]["gather", "all", "all"]
    if sum(step.q_lens):
        inputs = step.inputs()
        expected = expected_attention(inputs)
        assert_attention(*reference, inputs, op="ring of ranks", expected=expected)
    for rank, answer in enumerate(ways):
        share = slice(*(step.num_heads * i // len(ways) for i in (rank, rank + 1)))
        for (exchange, out_heads, queries), result in answer[step, placement].items():
            heads = share if out_heads == "own" else slice(None)
            for ours, whole in zip(result, reference, strict=True):
                assert ours.is_contiguous()
                assert torch.equal(ours, whole[:, heads]), (exchange, out_heads, queries)


def test_what_travels_is_what_the_choice_goes_by(answers):
    _, received = answers
    size = len(received)
    for way, (_, chosen, rounds, auto) in received[0].items():
        assert max(answer[way][0] for answer in received) == chosen
        assert rounds == (2 if way == ("all_to_all", "all") else 1)
        assert auto == ("gather" if way[1] == "all" else "all_to_all")
    everything = received[0]["gather", "all"][0]
    for answer in received:
        assert answer["all_to_all", "own"][0] == everything // size
        assert answer["all_to_all", "all"][0] == 2 * everything // size


def test_auto_is_by_heads_where_that_saves_more_than_a_round():
    cp = first_of(8, placement=PLACEMENTS["tokens"](8, 16))
    plan = cp.plan_decode([40] * 4, block_tables=torch.arange(12).view(4, 3))
    layer = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    choice = cp.choose_exchange(plan, **layer)
    assert choice.exchange == "gather"
    assert "all_to_all takes a second round, which is worth 262144 bytes" in choice.reason
    assert cp.choose_exchange(plan, **layer, out_heads="own").exchange == "all_to_all"
    with pytest.raises(ValueError, match="out_heads must be one of all, own, got 'some'"):
        cp.choose_exchange(plan, **layer, out_heads="some")
