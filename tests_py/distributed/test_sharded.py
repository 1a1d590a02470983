# SPDX-License-Identifier: Apache-2.0
"""Attention over KV pools of which each gloo rank holds a share: against float64 and one pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cpattn
from cpattn.distributed.transport.exchange import TERMS
from cpattn.distributed.transport.versions import own_values
from support.cases import assert_attention, expected_attention
from support.distributed import sharded_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.layer_cases import LAYER_NAMES, decoded, layer_inputs
from support.distributed.prefill_batches import Case, expected_of
from support.distributed.sharded_worker import PLACEMENTS, Run, Step
from support.tolerances import assert_attended

pytestmark = pytest.mark.slow

EXCHANGES = ("pass_q", "gather", "ring", "all_to_all")
EXACT = ("gather", "all_to_all")  # those whose bits are those of one pool that holds everything
BATCHES = [
    Case("different prefixes", (13, 40, 9), (64, 0, 7)),
    Case("long prefix", (5,), (700,), page_size=16),
    Case("decode and prefill", (1, 1, 1, 30, 18, 2), (9, 33, 1, 0, 12, 3)),
    Case("fewer tokens than ranks", (1,), (6,)),
    Case("empty request", (0, 11, 0), (8, 2, 0)),
    Case("nothing new", (0, 0), (8, 3)),
    Case("padding tokens", (9, 6), (3, 5), num_tokens=22),
    Case("physical padding", (9, 15), (3, 5), pad_to_physical=True),
    Case("bfloat16", (21, 90), (60, 0), dtype=torch.bfloat16),
    Case("float16", (21, 18), (6, 0), dtype=torch.float16),
    Case("one KV head", (21, 18), (6, 0), head_dim=48, num_kv_heads=1),
    Case("heads for no number of ranks", (21, 18), (6, 0), num_heads=7, num_kv_heads=7),
]
STRATEGIES = ("zigzag", "interleave", "contiguous")
RUNS = [
    Run(case, placement, exchange)
    for case in BATCHES
    for placement in PLACEMENTS
    for exchange in EXCHANGES
] + [
    Run(replace(BATCHES[0], name=f"{strategy}", strategy=strategy), "pages", exchange)
    for strategy in STRATEGIES
    for exchange in EXCHANGES
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def prefills(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("world"), worker.run_prefills, RUNS)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_prefill_is_that_of_the_oracle(prefills, run):
    dtype = str(run.case.dtype).removeprefix("torch.")
    mine, *others = (answer[str(run)] for answer in prefills)
    assert_attended(mine["out"], mine["lse"], expected_of(run.case), dtype, op="ring of ranks")
    assert mine["out"].dtype == run.case.dtype
    for other in others:
        assert torch.equal(other["out"], mine["out"])
        assert torch.equal(other["lse"], mine["lse"])
    for answer in prefills:
        assert answer[str(run)]["shards"]
        assert not answer[str(run)]["padding"].any()
        assert answer[str(run)]["same bits"] or run.exchange not in EXACT


def test_every_rank_holds_a_share_of_the_keys(prefills):
    case = BATCHES[1]
    for placement in PLACEMENTS:
        counts = prefills[0][str(Run(case, placement, EXCHANGES[0]))]["kv_counts"]
        assert sum(counts) == sum(case.seq_lens)
        assert min(counts) > 0


@pytest.mark.parametrize("run", [run for run in RUNS if run.exchange == "ring"], ids=str)
def test_bits_do_not_depend_on_whether_queries_or_keys_travel(prefills, run):
    """Partial results are merged in the order of the shares, whoever computes them."""
    for answer in prefills:
        for name in ("out", "lse"):
            other = answer[str(replace(run, exchange="pass_q"))][name]
            assert torch.equal(answer[str(run)][name], other)


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def layer_answers(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("layers")
    return run_world(request.param, path, worker.run_layers, list(EXCHANGES))


LAYERS = [
    f"{exchange}, {placement}, {name}"
    for exchange in EXCHANGES
    for placement in PLACEMENTS
    for name in LAYER_NAMES
    if exchange == "pass_q" or not name.startswith("codes, scales of tokens")
]


@pytest.mark.parametrize("what", LAYERS)
def test_layer_is_that_of_the_oracle(layer_answers, what):
    exchange, _, name = what.split(", ", 2)
    for answer in layer_answers:
        out, lse = answer[what]
        assert_attention(out, lse, decoded(layer_inputs(name)), op="ring of ranks")
        if exchange in EXACT:
            inputs = layer_inputs(name)
            expected = cpattn.paged_attention(**inputs, batch_invariant=True, return_lse=True)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])


STEPS = [
    Step("one token each", (9, 1, 200, 64), (1, 1, 1, 1)),
    Step("drafts", (9, 5, 70, 33), (4, 5, 3, 1)),
    Step("idle request", (9, 40), (0, 2)),
    Step("bfloat16", (150, 33), (1, 3), dtype=torch.bfloat16),
    Step("latents", (50, 33), (1, 3), latent=True, options=(("scale", 0.3),)),
    Step("rotary keys apart", (50, 33), (1, 3), rope_apart=True),
    Step("latents, rotary keys apart", (50, 33), (1, 3), latent=True, rope_apart=True),
    Step("window", (90, 33), (2, 3), options=(("window", 11),)),
    Step("sinks and softcap", (9, 40), (1, 2), options=(("sinks", True), ("softcap", 2.0))),
    Step("tree of drafts", (29, 40), (7, 5), masked=True),
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def steps(request, tmp_path_factory):
    return run_world(request.param, tmp_path_factory.mktemp("steps"), worker.run_steps, STEPS)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_decode_is_that_of_the_oracle_with_the_same_bits_on_every_rank(steps, step, placement):
    mine, *others = (answer[f"{placement}, {step.name}"] for answer in steps)
    inputs = step.inputs()
    assert_attention(
        mine["out"], mine["lse"], inputs, op="ring of ranks", expected=expected_attention(inputs)
    )
    for other in others:
        assert torch.equal(other["out"], mine["out"])
        assert torch.equal(other["lse"], mine["lse"])


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    path = tmp_path_factory.mktemp("traffic")
    return run_world(3, path, worker.run_traffic, replace(BATCHES[0], num_heads=12, num_kv_heads=6))


def test_new_rows_travel_to_their_owners_only(traffic):
    row_bytes = 2 * 6 * 32 * 4  # of keys and values
    for answer in traffic:
        assert answer["pass_q"]["received"]["write_kv"] == (
            answer["pass_q"]["rows to write"] * row_bytes
        )


@pytest.mark.parametrize("exchange", ["pass_q", "gather", "all_to_all"])
def test_what_travels_is_what_the_choice_goes_by(traffic, exchange):
    most = max(answer[exchange]["received"]["attend"] for answer in traffic)
    assert most == traffic[0][exchange]["choice"][exchange]


@pytest.mark.parametrize("exchange", ["pass_q", "gather", "all_to_all", "ring"])
def test_bytes_of_calls_and_of_agreements_are_counted(traffic, exchange):
    agreements = 2 * 2 * 8 * len(TERMS)  # of write_kv and attend, from two others
    if exchange == "pass_q":  # the first on the group, so that ranks tell their versions
        agreements += 2 * 8 * len(own_values(0))
    for answer in traffic:
        _, received = answer[exchange]["all bytes"]
        assert received == sum(answer[exchange]["received"].values()) + agreements
    sent, received = zip(*(answer[exchange]["all bytes"] for answer in traffic), strict=True)
    assert sum(sent) == sum(received)


def test_a_ring_sends_and_receives_while_it_computes_some_heads_at_a_time(traffic):
    first, then, last = ["post", "compute"], ["finish", "post", "compute"], ["finish", "compute"]
    for answer in traffic:
        assert answer["ring"]["events"] == 6 * first + 6 * then + 6 * last
