# SPDX-License-Identifier: Apache-2.0
"""Few ranks and many, parts of the world, chunks of a prompt; ranks that are lost or stopped."""

import pytest

from support.distributed import sharded_worker
from support.distributed.answers import assert_prefill
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import faults
from support.distributed.prefill_batches import Case
from support.distributed.sharded_worker import EXCHANGES, Run
from support.time_limits import BUSY


@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
def test_one_token_leaves_other_ranks_without_rows(tmp_path, size):
    few, many = Case("one token", (1,), (6,)), Case("requests", (13, 40, 9), (64, 0, 7))
    runs = [Run(case, "pages", exchange) for case in (few, many) for exchange in EXCHANGES]
    answers = run_world(size, tmp_path, sharded_worker.run_prefills, runs)
    for run in runs:
        assert_prefill(answers, run)
    rows = answers[0][runs[0]]["rows_per_rank"]
    assert sorted(rows) == [0] * (size - 1) + [1]


def test_a_rank_that_ends_well_is_not_missed(tmp_path):
    """Its process has ended, but all has come that the others wait for."""
    said = run_world(4, tmp_path, faults.run_early_end)
    assert said == [None, *["no error"] * 3]


def test_interrupt_ends_a_wait(tmp_path):
    seconds, _ = run_world(2, tmp_path, faults.run_interrupt_of_gather)
    assert seconds < 1 + BUSY
