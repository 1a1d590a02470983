# SPDX-License-Identifier: Apache-2.0
"""Two hosts of two ranks, one of which is lost: all others name it, on either host."""

from __future__ import annotations

import re
import time

import pytest

from support.distributed import shared_pool_worker as pools
from support.distributed.distributed_worker import run_world
from support.distributed.hosts import faults as worker
from support.time_limits import BUSY, PATIENCE

pytestmark = pytest.mark.slow

LAYOUT = ((0, 1), (2, 3))


@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("when", ["before it", "as it writes", "as rows of others arrive"])
def test_a_killed_rank_is_named_on_both_hosts_at_once(tmp_path, lost, when):
    clock = tmp_path / "clock"
    answers = run_world(4, tmp_path, worker.run_loss, LAYOUT, lost, when, clock)
    assert answers.pop(lost) is None
    for message, told in answers:
        assert re.match(
            rf"RuntimeError: ContextParallel\.write_kv.*: rank {lost} of 4 did not answer: ",
            message,
        )
        assert told - float(clock.read_text()) < 1 + BUSY


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("when", worker.ATTENDING)
def test_a_rank_killed_between_rounds_of_heads_is_named(tmp_path, lost, when):
    clock = tmp_path / "clock"
    answers = run_world(4, tmp_path, worker.run_loss, LAYOUT, lost, when, clock)
    assert answers.pop(lost) is None
    for message, told in answers:
        assert re.match(
            rf"RuntimeError: ContextParallel\.attend.*: rank {lost} of 4 did not answer: ", message
        )
        assert told - float(clock.read_text()) < 1 + BUSY


def test_a_stopped_rank_is_named_on_both_hosts_after_the_timeout(tmp_path):
    answers = run_world(
        4, tmp_path, worker.run_loss, LAYOUT, 2, "stopped", tmp_path / "clock", group_timeout=2
    )
    stopped, _ = answers.pop(2)
    for message, _ in answers:
        assert re.match(
            r"RuntimeError: ContextParallel\.write_kv.*: rank 2 of 4 did not answer: ", message
        )
    assert re.match(r"RuntimeError: ContextParallel\.write_kv.* did not answer: ", stopped)


def test_who_waits_for_the_lost_rank_at_its_host_is_not_taken_for_it(tmp_path):
    """Rank 0 waits for rank 2 longer than that for rank 3: it asks, and rank 2 looks up."""
    world = (worker.run_stopped_behind_a_late_one, LAYOUT)
    *others, stopped = run_world(4, tmp_path, *world, group_timeout=3)
    for message in others:
        assert re.search(r"rank 3 of 4 did not answer: ", message), others
    assert re.search(r" did not answer: ", stopped)


def test_ctrl_c_at_the_meeting_of_a_host_is_told_on_the_other(tmp_path):
    """Rank 0 waits for rank 1, which has not come; ranks 2 and 3 wait for rows of both."""
    answers = run_world(4, tmp_path, worker.run_interrupt, LAYOUT)
    assert answers[0][0] == "KeyboardInterrupt"
    assert answers[0][1] < 1 + BUSY
    for message, _ in answers[1:]:
        assert re.search(r"rank 0 of 4 did not answer: .*left by an error", message), message


def test_memory_that_one_host_lacks_is_an_error_on_both(tmp_path):
    for told in run_world(4, tmp_path, worker.run_without_memory, LAYOUT):
        assert re.fullmatch(
            r"MemoryError: MHATokenToKVPool: the host of rank 2, 3 has no [\d.]+ GiB for a pool "
            r"that 2 ranks share, 0 GiB are available",
            told["one host has none"],
        )
        assert re.fullmatch(
            r"MemoryError: MHATokenToKVPool: rank 1 of 4 cannot have [\d.]+ GiB of shared memory: "
            r"File too large",
            told["no file of that size"],
        )
        assert re.fullmatch(
            r"MemoryError: MHATokenToKVPool: rank 3 of 4 must give \d+ bytes of shared memory, got "
            r"a file of \d+",
            told["a short part"],
        )
        assert told["at last"] == "no error"
        assert told["files"] == "[]"


def test_a_forked_child_says_nothing_to_anybody(tmp_path):
    messages = run_world(4, tmp_path, worker.run_fork, LAYOUT)
    assert re.search(r"rank 3 is process \d+; its forked child \d+ cannot take part", messages[3])
    assert messages[:3] == [""] * 3


def test_ranks_that_are_killed_leave_nothing_behind(tmp_path):
    """What each host shared had no name, and the system has the memory of both back."""
    before = pools.shared_bytes()
    ranks = run_world(4, tmp_path, worker.run_killed_with_pools, LAYOUT, tmp_path)
    assert ranks == [None] * 4
    held = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert min(held) - before > 3 * pools.POOL_BYTES // 2  # a pool for each host
    deadline = time.monotonic() + PATIENCE
    while pools.shared_bytes() - before > pools.POOL_BYTES // 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
