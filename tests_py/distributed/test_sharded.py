# SPDX-License-Identifier: Apache-2.0
"""Prefills over whole and sharded pools are right by each exchange, on ranks of this host."""

from dataclasses import replace

import pytest

import cpattn
from cpattn.distributed.transport.terms import TERMS
from cpattn.distributed.transport.versions import own_values
from support.distributed import sharded_worker as worker
from support.distributed.answers import assert_prefill, by_size
from support.distributed.distributed_worker import run_world
from support.distributed.layer_worker import STRATEGIES
from support.distributed.prefill_batches import BATCHES, LONG, Case
from support.distributed.sharded_worker import EXCHANGES, PLACEMENTS, Run, equal
from support.pairwise import pairwise

CHOSEN = [
    Run(replace(case, strategy=strategy), placement, exchange)
    for case, strategy, placement, exchange in pairwise(
        BATCHES, STRATEGIES, [*PLACEMENTS], EXCHANGES
    )
]


def with_pass_q(chosen):
    """Return runs, and each ring again by pass_q, which has its bits."""
    rings = [replace(run, exchange="pass_q") for run in chosen if run.exchange == "ring"]
    return tuple(dict.fromkeys(chosen + rings))


RUNS_OF = {2: with_pass_q(CHOSEN[::2]), 3: with_pass_q(CHOSEN)}


@pytest.mark.parametrize(("size", "run"), by_size(RUNS_OF))
def test_prefill_is_that_of_the_oracle(answers_of, size, run):
    """Partial results are merged in the order of the shares, with traveling queries or keys."""
    prefills, case = answers_of(size, worker.run_prefills, RUNS_OF[size]), run.case
    assert_prefill(prefills, run)
    plans = cpattn.build_cp_metadata_all_ranks(
        list(case.extend_lens), case.seq_lens, cp_size=size, strategy=case.strategy,
        num_tokens=case.num_tokens,
    )  # fmt: skip
    for rank, answer in enumerate(prefills):
        assert answer[run]["rows_per_rank"] == tuple(plans[rank].per_rank_actual_token)
        if case.pad_to_physical:
            physical = plans[rank].pad_to_physical().per_rank_actual_token[rank]
            assert answer[run]["num_rows"] == physical
        if run.exchange == "ring":
            other = answer[replace(run, exchange="pass_q")]
            assert equal(answer[run]["sharded"], other["sharded"])
    counts = prefills[0][run]["kv_counts"]
    assert sum(counts) == sum(case.seq_lens)
    assert case.name != LONG.name or min(counts) > 0


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    case = Case("traffic", (13, 40, 9), (64, 0, 7), num_heads=12, num_kv_heads=6)
    return run_world(3, tmp_path_factory.mktemp("world"), worker.run_traffic, case, EXCHANGES)


def test_new_rows_travel_to_their_owners_only(traffic):
    row_bytes = 2 * 6 * 32 * 4  # keys and values
    for answer in traffic:
        by_queries = answer["pass_q"]
        assert by_queries["received"][0] == by_queries["rows to write"] * row_bytes


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_travels_is_what_the_choice_goes_by_and_is_counted(traffic, exchange):
    answers = [answer[exchange] for answer in traffic]
    if exchange != "ring":  # a ring also sends the rest of a rank's last block
        most = max(answer["received"][1] for answer in answers)
        assert most == answers[0]["choice"][exchange]
    agreements = 2 * 2 * 8 * len(TERMS)  # write_kv and attend, two others
    if exchange == EXCHANGES[0]:  # the first on the group also compares versions
        agreements += 2 * 8 * len(own_values(0))
    for answer in answers:
        assert answer["all bytes"][1] == sum(answer["received"]) + agreements
    sent, received = zip(*(answer["all bytes"] for answer in answers), strict=True)
    assert sum(sent) == sum(received)


def test_one_call_receives_what_its_choice_says_head_after_head(traffic):
    """A round is posted before the wait for the previous one; new rows travel once."""
    for answer in traffic:
        events = answer["gather"]["events of one call"]
        assert events == ["post", *["post", "finish"] * 5, "finish"]
    received, chosen = zip(*(answer["gather"]["one call"] for answer in traffic), strict=True)
    assert max(received) == chosen[0]


def test_a_ring_sends_and_receives_while_it_computes_some_heads_at_a_time(traffic):
    first, then, last = ["post", "compute"], ["finish", "post", "compute"], ["finish", "compute"]
    for answer in traffic:
        assert answer["ring"]["events"] == 6 * first + 6 * then + 6 * last
