# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped or interrupted on hosts with shared memory; hosts without it."""

import re

import pytest

from support.distributed.distributed_worker import run_world
from support.distributed.hosts import faults as worker
from support.distributed.hosts.layouts import size_of
from support.time_limits import BUSY

ONE, TWO = ((0, 1, 2),), ((0, 1), (2, 3))


@pytest.mark.slow
def test_who_waits_for_the_lost_rank_at_its_host_is_not_taken_for_it(tmp_path):
    """Rank 0 waits for rank 2 longer than rank 2 for rank 3: it asks, and rank 2 answers."""
    world = (worker.run_stopped_behind_a_late_one, TWO)
    *others, stopped = run_world(4, tmp_path, *world, group_timeout=3)
    for message in others:
        assert re.search(r"rank 3 of 4 did not answer: ", message), others
    assert re.search(r" did not answer: ", stopped)


@pytest.mark.parametrize("layout", [((0, 1),), pytest.param(TWO, marks=pytest.mark.slow)])
def test_ctrl_c_at_the_meeting_of_a_host_is_told_to_all(tmp_path, layout):
    """Rank 0 waits for rank 1, which is late; ranks of another host wait for rows of both."""
    size = size_of(layout)
    interrupted, *others = run_world(size, tmp_path, worker.run_interrupt, layout)
    assert interrupted[0] == "KeyboardInterrupt"
    assert interrupted[1] < 1 + BUSY
    for message, _ in others:
        assert re.search(rf"rank 0 of {size} did not answer: .*left by an error", message), message


@pytest.mark.parametrize("layout", [ONE, pytest.param(TWO, marks=pytest.mark.slow)])
def test_memory_that_is_not_there_is_an_error_of_all_ranks(tmp_path, layout):
    size = size_of(layout)
    owner = "the host" if layout == ONE else "the host of rank 2, 3"
    sharing = len(layout[-1])
    lacking = rf"has no [\d.e+]+ GiB for a pool that {sharing} ranks share, [\d.e+]+ GiB are avail"
    for rank, told in enumerate(run_world(size, tmp_path, worker.run_without_memory, layout)):
        for what, pattern in {
            "beyond the host": rf"the host.* {lacking}able",
            "one host has none": rf"{owner} {lacking}able",
            "no file of that size": rf"rank 1 of {size} cannot have [\d.]+ GiB of shared memory: "
            "File too large",
            "a short part": rf"rank {size - 1} of {size} must give \d+ bytes of shared memory, "
            r"got a file of \d+",
            "cannot map": f"rank 1 of {size} cannot map the pool",
        }.items():
            own = "full|" if what == "cannot map" and rank == 1 else ""
            message = rf"MemoryError: ({own}MHATokenToKVPool: {pattern})"
            assert re.fullmatch(message, told[what])
        assert told["other sizes"] == (
            "RuntimeError: ContextParallel.shared_memory: shared memory of rank 1 differs from "
            "rank 0; nothing was sent"
        )
        assert told["at last"] == "no error"
        assert told["left behind"] == []  # the pool is freed


@pytest.mark.parametrize("layout", [ONE, pytest.param(TWO, marks=pytest.mark.slow)])
def test_a_forked_child_is_not_the_rank_and_says_nothing_to_anybody(tmp_path, layout):
    *others, last = run_world(size_of(layout), tmp_path, worker.run_fork, layout)
    named = rf"rank {len(others)} is process \d+; its forked child \d+ cannot take part"
    assert re.search(named, last)
    assert others == [""] * len(others)


def test_a_rank_that_ends_well_is_not_missed(tmp_path):
    """Its process has ended, but everything that others wait for has come."""
    said = run_world(4, tmp_path, worker.run_early_end)
    assert said == [None, *["no error"] * 3]


def test_interrupt_ends_a_wait(tmp_path):
    seconds, _ = run_world(2, tmp_path, worker.run_interrupt_of_gather)
    assert seconds < 1 + BUSY


def test_two_groups_on_a_host_of_which_one_loses_a_rank(tmp_path):
    """Ranks 0 and 1 share a pool, ranks 2 and 3 another: the second pair never notices."""
    (told, seconds, later), killed, *others = run_world(
        4, tmp_path, worker.run_two_groups_and_a_loss, tmp_path
    )
    assert killed is None
    assert re.match(
        r"RuntimeError: ContextParallel\.write_kv.*: rank 1 of 2 did not answer: "
        r"process \d+ has ended",
        told,
    )
    assert seconds < 1 + BUSY
    assert "cannot be used any more" in later
    assert others == [("no error", 0.0, "")] * 2
