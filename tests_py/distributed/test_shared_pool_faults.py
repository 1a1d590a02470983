# SPDX-License-Identifier: Apache-2.0
"""Pools that the ranks of a host share: ranks that differ, are lost, or have no memory."""

from __future__ import annotations

import re
import time

import pytest

from support.distributed import shared_pool_worker as worker
from support.distributed.distributed_worker import run_world
from support.time_limits import BUSY, PATIENCE

pytestmark = pytest.mark.slow


def test_disagreements_are_told_in_the_same_words_as_over_gloo(tmp_path):
    for over_gloo, through_memory in run_world(3, tmp_path, worker.run_disagreements):
        assert {name: told for name, (told, _) in through_memory.items()} == {
            name: told for name, (told, _) in over_gloo.items()
        }
        assert all(seconds < BUSY for _, seconds in through_memory.values())


def test_caches_that_differ_are_told(tmp_path):
    differs = (
        "RuntimeError: ContextParallel.write_kv: shared memory of rank 1 differs from rank 0; "
        "nothing was sent"
    )
    for rank, (layer, private, mixed) in enumerate(run_world(3, tmp_path, worker.run_other_caches)):
        assert layer == private == differs
        assert mixed == (
            "ValueError: ContextParallel.write_kv: k_cache and v_cache must be in shared memory "
            "both or neither, got only k_cache there"
            if rank == 1
            else "RuntimeError: ContextParallel.write_kv: rank 1 refused its arguments; "
            "nothing was sent"
        )


@pytest.mark.parametrize("how", ["killed", "killed as it writes"])
def test_a_killed_rank_is_named_at_once(tmp_path, how):
    clock = tmp_path / "clock"
    *others, last = run_world(3, tmp_path, worker.run_loss, how, clock)
    assert last is None
    for message, told in others:
        assert re.fullmatch(
            r"RuntimeError: ContextParallel.write_kv.*: rank 2 of 3 did not answer: "
            r"process \d+ has ended",
            message,
        )
        assert told - float(clock.read_text()) < 1 + BUSY


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path):
    timeout = 1
    *others, stopped = run_world(
        3, tmp_path, worker.run_loss, "stopped", tmp_path, group_timeout=timeout
    )
    for message, _ in others:
        assert message == (
            "RuntimeError: ContextParallel.write_kv (agreement): rank 2 of 3 did not answer: "
            "timed out after 1 s"
        )
    # It finds that the others had agreed with it, and then that they have left.
    assert re.search(r"rank 0, 1 of 3 did not answer: process \d+ has left by an error", stopped)


def test_ctrl_c_ends_a_wait_and_the_others_are_told(tmp_path):
    (seconds, _), (_, message) = run_world(2, tmp_path, worker.run_interrupt)
    assert seconds < 1 + BUSY
    assert re.search(r"rank 0 of 2 did not answer: process \d+ has left by an error", message)


def test_a_forked_child_is_not_the_rank(tmp_path):
    (_, first), (message, second) = run_world(2, tmp_path, worker.run_fork)
    assert re.search(r"rank 1 is process \d+; its forked child \d+ cannot take part", message)
    assert first
    assert second


def test_a_rank_that_cannot_say_where_it_is_tells_the_others(tmp_path):
    (told, at_last), (error, also) = run_world(2, tmp_path, worker.run_hidden, group_timeout=3)
    assert told == (
        "RuntimeError: ContextParallel.topology: rank 1 refused its arguments; nothing was sent"
    )
    assert error.startswith("FileNotFoundError: ")
    assert at_last == also == "shm"


def test_memory_that_is_not_there_is_an_error_of_all_ranks(tmp_path):
    answers = run_world(3, tmp_path, worker.run_without_memory)
    for rank, told in enumerate(answers):
        assert re.fullmatch(
            r"MemoryError: MHATokenToKVPool: the host has no 2.62e\+05 GiB for a pool that 3 ranks "
            r"share, [\d.e+]+ GiB are available",
            told["beyond the host"],
        )
        assert re.fullmatch(
            r"MemoryError: MHATokenToKVPool: rank 1 of 3 cannot have [\d.]+ GiB of shared memory: "
            r"File too large",
            told["no file of that size"],
        )
        assert told["cannot map"] == (
            "MemoryError: full"
            if rank == 1
            else "MemoryError: MHATokenToKVPool: rank 1 of 3 cannot map the pool"
        )
        assert told["other sizes"] == (
            "RuntimeError: ContextParallel.shared_memory: shared memory of rank 1 differs from "
            "rank 0; nothing was sent"
        )
        assert told["at last"] == "no error"
        assert told["files"] == "[]"
        assert told["maps"] == "False"  # the pool is gone


def test_processes_that_are_killed_leave_nothing_behind(tmp_path):
    """What they shared had no name, and the system has its memory back."""
    before = worker.shared_bytes()
    assert run_world(3, tmp_path, worker.run_killed_with_a_pool, tmp_path) == [None] * 3
    held = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert min(held) - before > worker.POOL_BYTES // 2
    deadline = time.monotonic() + PATIENCE
    while worker.shared_bytes() - before > worker.POOL_BYTES // 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
