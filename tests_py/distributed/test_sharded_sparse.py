# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over pools of which each gloo rank holds a share: the keys of one pool."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import cpattn
from cpattn import reference
from support.distributed import sparse_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.sharded_worker import PLACEMENTS
from support.distributed.sparse_worker import SparseRun
from support.sparse.indexer_batch import ROW_FORMS
from support.sparse.sparse_mla_cases import errors_of
from support.tolerances import Expected, assert_attended

pytestmark = pytest.mark.slow

EXCHANGES = ("pass_q", "gather")
BATCHES = [
    SparseRun("prefixes and an empty request"),
    SparseRun("one key for each row", topk=1),
    SparseRun("all keys", topk=200),
    SparseRun("some rows select, others see too few", topk=30),
    SparseRun("fewer tokens than ranks", (1,), (70,)),
    SparseRun("nothing new", (0, 0), (8, 3)),
    SparseRun("no prefixes", (40, 3), (0, 0)),
    SparseRun("padding tokens", num_tokens=63),
    SparseRun("physical padding", pad_to_physical=True),
    SparseRun("sinks", sinks=True),
    SparseRun("bfloat16", kv_dtype=torch.bfloat16),
    SparseRun("rows of 656 bytes", fp8_rows=True, sinks=True),
    SparseRun("small scratch", max_scratch_bytes=20_000),
    SparseRun("less scratch than a row", max_scratch_bytes=1),
]
INDICES = [
    SparseRun("float32", index_dtype="float32", form=ROW_FORMS[1]),
    SparseRun("slots with scales", scaled=True, form=ROW_FORMS[2]),
    SparseRun("e4m3fn with scales", index_dtype="float8_e4m3fn", scaled=True),
    SparseRun("int8 with scales", index_dtype="int8", form=ROW_FORMS[1], scaled=True),
    SparseRun("pages of codes and scales", index_dtype="uint8", form="", scaled=True),
]
RUNS = [
    replace(run, exchange=exchange, placement=placement)
    for exchange in EXCHANGES
    for placement in PLACEMENTS
    for run in BATCHES + INDICES
] + [
    SparseRun(strategy, strategy=strategy, exchange=exchange)
    for strategy in ("interleave", "contiguous")
    for exchange in (*EXCHANGES, "auto")
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    return run_world(request.param, path, worker.run_sparse_layers, RUNS)


@cache
def alone(run: SparseRun) -> tuple[torch.Tensor, torch.Tensor]:
    return run.alone()


@cache
def oracle(run: SparseRun) -> tuple[Expected, np.ndarray]:
    """Attention in float64 to the keys of the best scores in float64, and which these are."""
    batch = run.batch()
    q, kv = run.attention(batch)
    if run.fp8_rows:
        kv = cpattn.sparse.dequantize_kv_rows(kv.view(-1, 656)).view(len(kv), 1, 576)
    options = run.attend_options()
    del options["topk"]
    inputs = {"q": q, "kv": kv, "indices": torch.from_numpy(run.selected_slots(batch)), **options}
    out, _, lse = reference.flash_mla_sparse_fwd(**inputs)
    return Expected(out, lse, *errors_of(inputs)), batch.expected()


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_union_over_shards_is_the_global_topk(answers, run):
    for answer in answers:
        np.testing.assert_array_equal(answer[str(run)]["positions"], oracle(run)[1])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layer_is_that_of_the_oracle(answers, run):
    mine, *others = (answer[str(run)] for answer in answers)
    dtype = str(mine["out"].dtype).removeprefix("torch.")
    assert_attended(mine["out"], mine["lse"], oracle(run)[0], dtype, op="ring of ranks")
    for other in others:
        assert torch.equal(other["out"], mine["out"])
        assert torch.equal(other["lse"], mine["lse"])
    for answer in answers:
        assert not answer[str(run)]["padding"].any()


@pytest.mark.parametrize("run", [run for run in RUNS if run.exchange == "gather"], ids=str)
def test_where_keys_travel_bits_are_those_of_one_pool(answers, run):
    for answer in answers:
        out, lse = alone(replace(run, placement="", strategy=""))
        assert torch.equal(answer[str(run)]["out"], out)
        assert torch.equal(answer[str(run)]["lse"], lse)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_travels_is_what_the_choice_goes_by(answers, exchange):
    run = str(SparseRun("prefixes and an empty request", exchange=exchange))
    expected = answers[0][run]["choice"].received_bytes[exchange]
    most = max(answer[run]["received"] for answer in answers)
    if exchange == "pass_q":
        assert most == expected
    else:  # tokens may select the same keys; rows of bits are of whole 16 bytes
        assert expected / 2 <= most < expected + 16 * len(answers)


@pytest.mark.parametrize("strategy", ["interleave", "contiguous"])
def test_auto_is_one_of_them(answers, strategy):
    runs = [SparseRun(strategy, strategy=strategy, exchange=name) for name in ("auto", *EXCHANGES)]
    for answer in answers:
        auto, *named = (answer[str(run)] for run in runs)
        chosen = named[EXCHANGES.index(auto["choice"].exchange)]
        assert torch.equal(auto["out"], chosen["out"])
        assert auto["received"] == chosen["received"]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_travels_at_once_is_bounded(answers, exchange):
    rounds = {
        name: answers[0][str(SparseRun(name, exchange=exchange))]["rounds"]
        for name in ("prefixes and an empty request", "small scratch", "less scratch than a row")
    }
    few, some, most = rounds.values()
    assert few == 1 < some < most
    assert most >= 59 / len(answers)  # a row of each rank at once


STEPS = [
    replace(run, exchange="auto", placement=placement)
    for placement in PLACEMENTS
    for run in (
        SparseRun("one token each", (1, 1, 1, 1), (8, 0, 200, 63)),
        SparseRun("drafts", (4, 5, 3, 1), (5, 0, 67, 32)),
        SparseRun("idle request", (0, 2), (9, 38), sinks=True),
        SparseRun("no request selects", (1, 3), (2, 4)),
        SparseRun("rows of 656 bytes", (1, 2), (40, 150), fp8_rows=True),
        *[replace(run, extend_lens=(2, 1), prefix_lens=(150, 9)) for run in INDICES],
    )
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{} ranks".format)
def steps(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("steps")
    return run_world(request.param, path, worker.run_sparse_steps, STEPS)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_decode_selects_the_global_topk_and_has_the_same_bits_on_every_rank(steps, step):
    mine, *others = (answer[str(step)] for answer in steps)
    expected, positions = oracle(step)
    np.testing.assert_array_equal(mine["positions"], positions)
    dtype = str(mine["out"].dtype).removeprefix("torch.")
    assert_attended(mine["out"], mine["lse"], expected, dtype, op="ring of ranks")
    for other in others:
        for name, value in mine.items():
            assert torch.equal(other[name], value)
