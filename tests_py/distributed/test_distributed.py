# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over gloo ranks, against one process and a float64 restatement.

A world of ranks is started once and runs all cases; the tests look at what came out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import cpattn
from support.distributed import distributed_worker as worker
from support.distributed.distributed_worker import run_world
from support.distributed.prefill_batches import Case, expected_of, make_batch, slots_of
from support.time_limits import BUSY
from support.tolerances import assert_attended

pytestmark = pytest.mark.slow


STRATEGIES = ("zigzag", "interleave", "contiguous")
BATCHES = [
    Case("one request", (29,)),
    Case("issue 23415", (367,), (1,), page_size=16),
    Case("long prefix", (5,), (1500,), page_size=64),
    Case("different prefixes", (13, 40, 9), (64, 0, 7)),
    Case("prefix ends in a page", (10, 14), (5, 0), page_size=16),
    Case("decode and prefill", (1, 1, 1, 30, 18, 2), (9, 33, 1, 0, 12, 3)),
    Case("prefill and decode", (30, 18, 2, 1, 1), (0, 12, 3, 9, 33)),
    Case("short requests", (3, 1, 2), (0, 5, 0), page_size=1),
    Case("fewer tokens than ranks", (1,), (6,)),
    Case("empty request", (0, 11, 0), (8, 2, 0)),
    Case("nothing new", (0, 0), (8, 3)),
    Case("padding tokens", (9, 6), (3, 5), num_tokens=22),
    Case("physical padding", (9, 15), (3, 5), pad_to_physical=True),
    Case("bfloat16", (21, 18), (6, 0), dtype=torch.bfloat16),
    Case("float16", (21, 18), (6, 0), dtype=torch.float16),
    Case("narrow values", (21, 18), (6, 0), head_dim=48, v_head_dim=32, num_kv_heads=1),
]
CASES = [
    replace(case, name=f"{strategy}: {case.name}", strategy=strategy)
    for case in BATCHES
    for strategy in STRATEGIES
]


@pytest.fixture(scope="session", params=[1, 2, 3, 4], ids="{} ranks".format)
def answers(request, tmp_path_factory):
    """The answers of all ranks to all cases."""
    return run_world(request.param, tmp_path_factory.mktemp("world"), worker.run_cases, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_result_is_that_of_one_process(answers, case):
    batch, num_real = make_batch(case), sum(case.extend_lens)
    expected = expected_of(case)
    dtype = str(case.dtype).removeprefix("torch.")
    mine, *others = (answer[case.name] for answer in answers)
    out = mine["out"][:num_real]
    assert len(mine["out"]) == (case.num_tokens or num_real)
    assert out.dtype == case.dtype
    assert_attended(out, mine["lse"][:num_real], expected, dtype)
    alone = cpattn.paged_attention(
        batch.q[:num_real],
        mine["k_cache"],
        mine["v_cache"],
        q_lens=case.extend_lens,
        kv_lens=case.seq_lens,
        block_tables=batch.block_tables,
        page_size=case.page_size,
    )
    assert_attended(alone, None, expected, dtype)
    for other in others:
        assert_same(other["out"], mine["out"])
        assert_same(other["lse"], mine["lse"])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pool_holds_prefixes_and_new_tokens_and_nothing_else_changed(answers, case):
    batch = make_batch(case)
    for pool, rows in ((batch.k_cache, batch.k), (batch.v_cache, batch.v)):
        for s, n in enumerate(case.seq_lens):
            pool[slots_of(batch.block_tables, s, n, case.page_size)] = rows[s]
    for answer in answers:
        assert_same(answer[case.name]["k_cache"], batch.k_cache)
        assert_same(answer[case.name]["v_cache"], batch.v_cache)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_per_rank_are_those_of_the_metadata(answers, case):
    plans = cpattn.build_cp_metadata_all_ranks(
        list(case.extend_lens),
        case.seq_lens,
        cp_size=len(answers),
        strategy=case.strategy,
        num_tokens=case.num_tokens,
    )
    for rank, answer in enumerate(answers):
        assert answer[case.name]["rows_per_rank"] == tuple(plans[rank].per_rank_actual_token)
        if case.pad_to_physical:
            physical = plans[rank].pad_to_physical().per_rank_actual_token[rank]
            assert answer[case.name]["num_rows"] == physical
        assert not answer[case.name]["pad_out"].any()


def test_one_token_leaves_other_ranks_without_rows(answers):
    rows = answers[0]["zigzag: fewer tokens than ranks"]["rows_per_rank"]
    assert sorted(rows) == [0] * (len(answers) - 1) + [1]


def test_chunked_prefill_is_that_of_one_step(tmp_path):
    """Chunks of one size, uneven ones that end in pages and blocks, and single tokens."""
    case = Case("chunks", (53,), page_size=8)
    chunkings = [[53], [16, 16, 16, 5], [17, 5, 31], [50, 1, 1, 1]]
    expected = expected_of(case)
    for outs in run_world(2, tmp_path, worker.run_chunks, case, chunkings):
        for out in outs:
            assert_attended(out, None, expected, "float32")


@pytest.fixture(scope="module")
def disagreements(tmp_path_factory):
    return run_world(3, tmp_path_factory.mktemp("disagreements"), worker.run_disagreements)


@pytest.mark.parametrize(
    ("what", "term"),
    [
        ("extend_lens", "lengths"),
        ("prefix", "lengths"),
        ("num_tokens", "lengths"),
        ("block_tables", "block_tables"),
        ("slots", "slots"),
        ("mask", "mask"),
        ("strategy", "strategy and page_size"),
        ("page_size", "strategy and page_size"),
        ("dtype", "rows"),
        ("width", "rows"),
        ("call", "call"),
        ("history", "sequence"),
    ],
)
def test_disagreement_is_told_to_all_ranks_before_rows_are_sent(disagreements, what, term):
    for told, _ in disagreements:
        message, seconds = told[what]
        assert message.startswith("RuntimeError: ContextParallel.")
        assert f": {term} of rank 1 differs from rank 0" in message
        assert message.endswith("; nothing was sent")
        assert seconds < BUSY


def test_different_calls_are_listed(disagreements):
    assert "(write_kv, gather, write_kv by rank)" in disagreements[2][0]["call"][0]


@pytest.mark.parametrize(
    ("what", "own"),
    [
        ("too few rows", "gather: x_local must have at least the 6 rows of rank 1, got 2"),
        ("small pool", "write_kv: slots must be below the 4 rows of k_cache, got slots["),
    ],
)
def test_refused_arguments_of_one_rank_are_told_to_all(disagreements, what, own):
    for rank, (told, _) in enumerate(disagreements):
        message, seconds = told[what]
        if rank == worker.ODD_RANK:
            assert f"ValueError: ContextParallel.{own}" in message
        else:
            assert "rank 1 refused its arguments; nothing was sent" in message
        assert seconds < BUSY


def test_group_stays_usable_after_disagreements(disagreements):
    case = worker.DISAGREEMENT
    expected = expected_of(case)
    for _, answer in disagreements:
        assert_attended(answer["out"], None, expected, "float32")


@pytest.mark.parametrize("how", ["killed before", "killed before it sends", "absent"])
def test_lost_rank_is_named_within_the_timeout(tmp_path, how):
    timeout = 4
    *others, _ = run_world(3, tmp_path, worker.run_loss, how, group_timeout=timeout)
    for message, seconds in others:
        assert message.startswith("RuntimeError: ContextParallel.write_kv")
        assert "rank 2 of 3 did not answer" in message
        assert seconds < timeout + BUSY


def test_rank_killed_while_its_rows_arrive_is_named_within_the_timeout(tmp_path):
    timeout = 8
    *others, last = run_world(3, tmp_path, worker.run_death, group_timeout=timeout)
    assert last is None
    ((killed, complete),) = others[0][2]
    assert not complete  # so that the kill met bytes in flight
    for rank, (message, told, _) in enumerate(others):
        if rank and message == "no error":
            continue  # its own rows were there before the kill
        assert message.startswith("RuntimeError: ContextParallel.gather")
        assert "rank 2 of 3 did not answer" in message
        assert told - killed < timeout + BUSY


def test_interrupt_ends_a_wait(tmp_path):
    seconds, _ = run_world(2, tmp_path, worker.run_interrupt)
    assert seconds < 1 + BUSY


def test_subgroup(tmp_path):
    case = Case("subgroup", (13, 4), (2, 9))
    expected = expected_of(case)
    outsider, *members = run_world(3, tmp_path, worker.run_subgroup, case)
    assert "group must be a ProcessGroup" in outsider
    for member in members:
        assert_attended(member["out"], None, expected, "float32")
