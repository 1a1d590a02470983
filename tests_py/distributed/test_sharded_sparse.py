# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over sharded pools selects the global top-k with every exchange."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpattn
from cpattn import reference
from cpattn.distributed.sparse.inputs import SparseInputs
from cpattn.distributed.sparse.selection import LocalIndex, best_positions, candidate_width
from support.distributed import sparse_worker as worker
from support.distributed.answers import by_size
from support.distributed.distributed_worker import run_world
from support.distributed.planning import key_shares
from support.distributed.sharded_worker import PLACEMENTS, equal, shard_of
from support.distributed.sparse_worker import SparseRun
from support.pairwise import pairwise
from support.sparse.indexer_batch import ROW_FORMS
from support.sparse.sparse_mla_cases import errors_of
from support.sparse.topk_cases import expected_topk
from support.tolerances import Expected, assert_attended

EXCHANGES = ("pass_q", "gather")
PLAIN = SparseRun("prefixes and an empty request")
BATCHES = [
    PLAIN,
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
AUTO = [replace(PLAIN, exchange=exchange) for exchange in ("auto", *EXCHANGES)]
ROUNDS = [replace(run, exchange=exchange) for run in BATCHES[-2:] for exchange in EXCHANGES]
CHOSEN = [
    replace(run, placement=placement, exchange=exchange, strategy=strategy)
    for run, placement, exchange, strategy in pairwise(
        BATCHES + INDICES, [*PLACEMENTS], EXCHANGES, ["zigzag", "interleave", "contiguous"]
    )
]
RUNS = [*dict.fromkeys(AUTO + ROUNDS + CHOSEN)]


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)], ids="{} ranks".format
)
def answers(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("world")
    return run_world(request.param, path, worker.run_sparse_layers, RUNS)


@cache
def alone(run: SparseRun) -> tuple[torch.Tensor, torch.Tensor]:
    return run.alone()


@cache
def oracle(run: SparseRun) -> tuple[Expected, np.ndarray]:
    """Return float64 attention to the keys with the best float64 scores, and their positions."""
    batch = run.batch()
    q, kv = run.attention(batch)
    if run.fp8_rows:
        kv = cpattn.sparse.dequantize_kv_rows(kv.view(-1, 656)).view(len(kv), 1, 576)
    options = run.attend_options()
    del options["topk"]
    inputs = {"q": q, "kv": kv, "indices": torch.from_numpy(batch.slots()), **options}
    out, _, lse = reference.flash_mla_sparse_fwd(**inputs)
    return Expected(out, lse, *errors_of(inputs)), batch.expected()


def assert_right(answers: list[dict], run: SparseRun) -> None:
    """Check that shards together select the global top-k, and results equal the oracle's."""
    mine = answers[0][run]
    expected, positions = oracle(replace(run, placement="", exchange="", strategy=""))
    dtype = str(mine["out"].dtype).removeprefix("torch.")
    assert_attended(mine["out"], mine["lse"], expected, dtype, op="ring of ranks")
    for told in (answer[run] for answer in answers):
        if run.exchange == "pass_q" or "choice" not in told:  # otherwise keys may travel
            np.testing.assert_array_equal(told["positions"], positions)
        assert equal([told["out"], told["lse"]], [mine["out"], mine["lse"]])


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_layer_is_that_of_the_oracle(answers, run):
    assert_right(answers, run)
    for told in (answer[run] for answer in answers):
        assert not told["padding"].any()
        if run.exchange == "gather":  # keys travel
            whole = alone(replace(run, placement="", exchange="", strategy=""))
            assert equal([told["out"], told["lse"]], whole)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_travels_is_what_the_choice_goes_by_and_bounded_at_once(answers, exchange):
    run = replace(PLAIN, exchange=exchange)
    expected = answers[0][run]["choice"].received_bytes[exchange]
    most = max(answer[run]["received"] for answer in answers)
    if exchange == "pass_q":
        assert most == expected
    else:  # tokens may select the same keys; rows of bits have whole 16 bytes
        assert expected / 2 <= most < expected + 16 * len(answers)
    few, some, least = (
        answers[0][replace(run, exchange=exchange)]["rounds"] for run in (PLAIN, *BATCHES[-2:])
    )
    assert few == 1 < some < least
    assert least >= 59 / len(answers)  # a row of each rank at once


def test_auto_is_one_of_them(answers):
    for answer in answers:
        auto, *named = (answer[run] for run in AUTO)
        chosen = named[EXCHANGES.index(auto["choice"].exchange)]
        assert torch.equal(auto["out"], chosen["out"])
        assert auto["received"] == chosen["received"]


STEPS = [
    replace(run, exchange="auto", placement=placement)
    for run, placement in pairwise(
        [
            SparseRun("one token each", (1, 1, 1, 1), (8, 0, 200, 63)),
            SparseRun("drafts", (4, 5, 3, 1), (5, 0, 67, 32)),
            SparseRun("idle request", (0, 2), (9, 38), sinks=True),
            SparseRun("no request selects", (1, 3), (2, 4)),
            SparseRun("rows of 656 bytes", (1, 2), (40, 150), fp8_rows=True),
            *[replace(run, extend_lens=(2, 1), prefix_lens=(150, 9)) for run in INDICES],
        ],
        [*PLACEMENTS],
    )
]

STEPS_OF = {2: tuple(STEPS[::2]), 3: tuple(STEPS)}


@pytest.mark.parametrize(("size", "step"), by_size(STEPS_OF))
def test_decode_selects_the_global_topk_and_has_the_same_bits_on_every_rank(answers_of, size, step):
    assert_right(answers_of(size, worker.run_sparse_steps, STEPS_OF[size]), step)


DIM = 16
# Scores of keys: ordered numbers of float32, NaN and zeros of both signs, and many equal ones.
SCORES = [np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 1.0, 2.0, -1.0, 3e38, -3e38, 1e-45]


@st.composite
def batches(draw):
    """Draw a placement, block tables, lengths, scores of all keys, and rows that see some keys."""
    size = draw(st.integers(1, 4))
    page = draw(st.sampled_from([2, 4, 8]))
    placement = PLACEMENTS[draw(st.sampled_from(sorted(PLACEMENTS)))](size, page)
    lens = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    counts = -(-lens // page)
    order = draw(st.permutations(range(int(counts.sum()) + 2)))
    tables = np.full((len(lens), int(counts.max())), -1, np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = order[: counts.sum()]
    scores = draw(
        st.lists(st.sampled_from(SCORES), min_size=len(order) * page, max_size=len(order) * page)
    )
    request = np.array(draw(st.lists(st.integers(0, len(lens) - 1), min_size=1, max_size=8)))
    visible = np.array([draw(st.integers(1, int(lens[s]))) for s in request])
    return placement, page, tables, lens, np.array(scores, np.float32), request, visible


def inputs_of(pool_scores, page, topk):
    """Return queries and keys whose product is 1, so that the scale of a key is its score."""
    one = torch.eye(1, DIM)
    slots = len(pool_scores)
    return SparseInputs(
        one[None], torch.zeros(slots, 1, 32), one[None], one.expand(slots, 1, DIM),
        torch.ones(1, 1), torch.from_numpy(pool_scores)[:, None], page_size=page, topk=topk,
        sm_scale=1.0, d_v=16, attn_sink=None,
    )  # fmt: skip


@given(batches(), st.integers(1, 12))
def test_the_union_of_what_ranks_select_is_the_selection_of_one_pool(batch, topk):
    placement, page, tables, lens, scores, request, visible = batch
    keep = visible > topk
    request, visible = request[keep], visible[keep]
    if not len(request):
        return
    shares = key_shares(placement, tables, lens, page)
    size = placement.shard_size
    width = candidate_width(shares, size, request, visible, topk)
    q, weights = torch.eye(1, DIM).expand(len(request), 1, DIM), torch.ones(len(request), 1)
    found = []
    for rank in range(size):
        shard = shard_of(placement, rank, torch.from_numpy(scores), page).numpy()
        index = LocalIndex(inputs_of(shard, page, topk), shares, rank)
        found.append(index.candidates(q, weights, request, visible, width))
    positions = best_positions(torch.cat(found, dim=1), topk)
    for row, (s, n) in enumerate(zip(request, visible, strict=True)):
        slots = tables[s, np.arange(n) // page] * page + np.arange(n) % page
        np.testing.assert_array_equal(positions[row], *expected_topk([scores[slots]], [n], topk))
