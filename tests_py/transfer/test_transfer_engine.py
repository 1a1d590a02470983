# SPDX-License-Identifier: Apache-2.0
"""Plans executed over engines."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import TransferPlan, execute


class ScriptedEngine:
    """Notes every write, and answers with codes or exceptions in turn, then with 0."""

    def __init__(self, *answers, max_blocks=4):
        self.max_blocks = max_blocks
        self.answers = list(answers)
        self.writes = []

    def write(self, *arguments):
        self.writes.append(arguments)
        answer = self.answers.pop(0) if self.answers else 0
        if isinstance(answer, BaseException):
            raise answer
        return answer


def plan_of(num_blocks):
    """Blocks of 1, 2, ... bytes at addresses beyond 2**48."""
    offsets = 4096 * np.arange(num_blocks, dtype=np.uint64)
    lengths = list(range(1, num_blocks + 1))
    return TransferPlan(offsets + np.uint64(1 << 48), offsets + np.uint64(1 << 49), lengths)


def test_batches_are_three_lists_of_plain_ints_in_order():
    engine, progress = ScriptedEngine(), []
    status = plan_of(10).execute(engine, "peer", progress=lambda *done: progress.append(done))
    assert [len(lengths) for _, _, _, lengths in engine.writes] == [4, 4, 2]
    for session, *lists in engine.writes:
        assert session == "peer"
        assert {type(values) for values in lists} == {list}
        assert {type(value) for values in lists for value in values} == {int}
    blocks = [block for _, *lists in engine.writes for block in zip(*lists, strict=True)]
    assert blocks == [((1 << 48) + 4096 * i, (1 << 49) + 4096 * i, i + 1) for i in range(10)]
    assert progress == [(4, 10), (8, 36), (10, 55)]
    assert status == 0
    assert list(vars(status).values()) == [3, None, 10, 55, 3]


@pytest.mark.parametrize("error", [RuntimeError("link down"), KeyboardInterrupt()])
def test_exceptions_pass_through_and_say_where(error):
    with pytest.raises(type(error)) as caught:
        plan_of(12).execute(ScriptedEngine(0, 0, error), "peer", retries=5)
    assert caught.value is error
    status = error.transfer_status
    assert (status.first_failed_batch, status.blocks_done, status.bytes_done) == (2, 8, 36)
    assert status == -1  # no code of the engine
    if hasattr(error, "add_note"):
        assert error.__notes__ == ["after 2 of 3 batches, 8 blocks and 36 bytes"]


@pytest.mark.parametrize(("batches", "first_failed"), [(1, 1), (3, None)])
def test_exceptions_of_progress_say_where_too(batches, first_failed):
    engine, calls = ScriptedEngine(), []

    def progress(*done):
        calls.append(done)
        if len(calls) == batches:
            raise RuntimeError("cancelled")

    with pytest.raises(RuntimeError, match="cancelled") as caught:
        plan_of(12).execute(engine, "peer", progress=progress)
    status = caught.value.transfer_status
    assert len(engine.writes) == batches
    assert (status.blocks_done, status.first_failed_batch) == (4 * batches, first_failed)


def test_retries_only_the_failed_batch_and_only_when_asked():
    engine = ScriptedEngine(0, -1, -2, 0)
    status = plan_of(12).execute(engine, "peer", retries=2)
    assert status == 0
    assert (status.attempts, status.num_batches) == (5, 3)
    assert engine.writes[1] == engine.writes[2] == engine.writes[3]
    assert engine.writes[3] != engine.writes[4]

    engine = ScriptedEngine(-1, 0, -2)
    status = plan_of(12).execute(engine, "peer", retries=1, check=False)
    assert (int(status), status.first_failed_batch, status.attempts) == (-2, 1, 3)


def test_timeout_names_the_batch_and_begins_no_other():
    engine = ScriptedEngine()
    with pytest.raises(TimeoutError, match=r"TransferPlan.execute: 0 s have passed") as caught:
        plan_of(12).execute(engine, "peer", timeout=0)
    assert engine.writes == []
    assert caught.value.transfer_status.first_failed_batch == 0
    assert plan_of(12).execute(engine, "peer", timeout=60) == 0


def test_code_of_a_failure_counts_more_than_the_timeout(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(execute, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class SlowEngine(ScriptedEngine):
        def write(self, *arguments):
            clock[0] += 1
            return super().write(*arguments)

    status = plan_of(12).execute(SlowEngine(-3), "peer", timeout=1, retries=9, check=False)
    assert (int(status), status.attempts) == (-3, 1)
    with pytest.raises(TimeoutError) as caught:
        plan_of(12).execute(SlowEngine(0, 0), "peer", timeout=2)
    assert caught.value.transfer_status.first_failed_batch == 2


def test_batches_are_bounded_in_bytes():
    mib = 1 << 20
    lengths = [100 * mib, 156 * mib, 1, 1 << 40, 100 * mib, 100 * mib, 100 * mib]
    engine = ScriptedEngine()
    assert TransferPlan([0] * 7, [0] * 7, lengths).execute(engine, "peer") == 0
    batches = [batch for _, _, _, batch in engine.writes]
    assert batches == [lengths[:2], lengths[2:3], lengths[3:4], lengths[4:6], lengths[6:]]


def test_execute_without_a_limit_of_the_engine():
    engine = ScriptedEngine()
    del engine.max_blocks
    plan_of(513).execute(engine, "peer")
    assert [len(lengths) for *_, lengths in engine.writes] == [512, 1]
