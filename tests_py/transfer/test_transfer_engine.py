# SPDX-License-Identifier: Apache-2.0
"""Plans are executed over engines; codes become errors, and other answers are refused."""

import copy
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn.transfer import TransferError, TransferPlan, TransferStatus, execute


class ScriptedEngine:
    """An engine that notes every write, and answers with these in turn, then with 0."""

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
    """Plan blocks of 1, 2, ... bytes at addresses from 2**48 on."""
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
    assert status == -1  # the engine gave no code
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
    assert plan_of(12).execute(engine, "peer", timeout=float("inf")) == 0


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


def answering(*codes):
    return ScriptedEngine(*codes, max_blocks=2)


PLAN = TransferPlan([8, 16, 24, 32, 40], [0] * 5, [8] * 5)


def test_a_failure_code_is_an_error_with_session_batch_and_code():
    with pytest.raises(TransferError) as caught:
        PLAN.execute(answering(0, -7), "10.0.0.1:15000")
    assert str(caught.value) == (
        "TransferPlan.execute: batch 1 of 3, counted from 0, to session '10.0.0.1:15000' failed "
        "with code -7 of the engine, after 2 blocks and 16 bytes"
    )
    status = caught.value.status
    assert isinstance(status, TransferStatus)
    assert (int(status), status.first_failed_batch, status.blocks_done) == (-7, 1, 2)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("answer", [None, True, False, 0.0, "0"])
@pytest.mark.parametrize("check", [True, False])
def test_what_is_no_code_is_no_success(answer, check):
    message = rf"write must return an integer code, 0 for success, got {type(answer).__name__}"
    with pytest.raises(TypeError, match=message) as caught:
        PLAN.execute(answering(0, answer), "peer", check=check)
    assert caught.value.transfer_status.blocks_done == 2


def test_a_status_is_an_int():
    assert not TransferStatus(0)
    for wrong in (np.zeros(2), "0", None):
        with pytest.raises(TypeError, match="TransferStatus: code must be an integer, got "):
            TransferStatus(wrong)
    assert repr(TransferStatus(-7, num_batches=3, first_failed_batch=1)) == (
        "TransferStatus(-7, num_batches=3, first_failed_batch=1, blocks_done=0, bytes_done=0, "
        "attempts=0)"
    )


def test_codes_of_numpy_are_codes():
    assert type(int(PLAN.execute(answering(*np.zeros(3, np.int32)), "peer"))) is int
    with pytest.raises(TransferError, match="code -3 "):
        PLAN.execute(answering(np.int64(-3)), "peer")
    assert TransferPlan([], [], []).execute(answering(), "peer") == 0  # no engine is asked


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_travels_with_its_status(protocol):
    error = TransferError("message", TransferStatus(-7, num_batches=3, first_failed_batch=1))
    error.link = "a note of the caller"
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert str(other) == "message"
        assert vars(other.status) == vars(error.status)
        assert (other.status, other.link) == (-7, "a note of the caller")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": float("nan")}, "timeout must be >= 0, got nan"),
        ({"timeout": -1}, "timeout must be >= 0, got -1"),
        ({"progress": 1}, "progress must be callable, got int"),
        ({"max_blocks": 0}, "max_blocks must be >= 1, got 0"),
        ({"retries": -1}, "retries must be >= 0, got -1"),
        ({"retries": "2"}, "retries must be an integer, got str"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(arguments, message):
    error = TypeError if re.search("got (str|int)", message) else ValueError
    with pytest.raises(error, match=f"^TransferPlan.execute: {message}$"):
        PLAN.execute(answering(), "peer", **arguments)


def test_lengths_up_to_the_last_byte_of_the_address_space():
    status = TransferPlan([0] * 3, [0] * 3, [2**64 - 10, 5, 4]).execute(answering(0, 0, 0), "peer")
    assert (status.num_batches, status.bytes_done) == (2, 2**64 - 1)
