# SPDX-License-Identifier: Apache-2.0
"""No transfer fails silently: codes become errors, and what is no code is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import cpattn
from cpattn.transfer import LocalEngine, TransferError, TransferPlan, TransferStatus


class Answering:
    """An engine whose every write answers the same."""

    max_blocks = 2

    def __init__(self, *answers):
        self.answers = list(answers)

    def write(self, *blocks):
        return self.answers.pop(0)


PLAN = TransferPlan([8, 16, 24, 32, 40], [0] * 5, [8] * 5)


def test_a_failure_code_is_an_error_with_session_batch_and_code():
    with pytest.raises(TransferError) as caught:
        PLAN.execute(Answering(0, -7), "10.0.0.1:15000")
    assert str(caught.value) == (
        "TransferPlan.execute: batch 1 of 3, counted from 0, to session '10.0.0.1:15000' failed "
        "with code -7 of the engine, after 2 blocks and 16 bytes"
    )
    status = caught.value.status
    assert isinstance(status, TransferStatus)
    assert (int(status), status.first_failed_batch, status.blocks_done) == (-7, 1, 2)
    assert isinstance(caught.value, RuntimeError)


def test_engines_that_look_at_codes_have_them_returned():
    status = PLAN.execute(Answering(0, -7), "peer", check=False)
    assert (int(status), status.first_failed_batch, status.bytes_done) == (-7, 1, 16)
    assert PLAN.execute(Answering(0, 0, 0), "peer", check=False) == 0


def test_retries_come_before_the_error():
    assert PLAN.execute(Answering(0, -1, 0, 0), "peer", retries=1).attempts == 4
    with pytest.raises(TransferError, match="batch 1 of 3"):
        PLAN.execute(Answering(0, -1, -1), "peer", retries=1)


@pytest.mark.parametrize("answer", [None, True, False, 0.0, "0"])
@pytest.mark.parametrize("check", [True, False])
def test_what_is_no_code_is_no_success(answer, check):
    message = rf"write must return an integer code, 0 for success, got {type(answer).__name__}"
    with pytest.raises(TypeError, match=message) as caught:
        PLAN.execute(Answering(0, answer), "peer", check=check)
    assert caught.value.transfer_status.blocks_done == 2


def test_codes_of_numpy_are_codes():
    assert type(int(PLAN.execute(Answering(*np.zeros(3, np.int32)), "peer"))) is int
    with pytest.raises(TransferError, match="code -3 "):
        PLAN.execute(Answering(np.int64(-3)), "peer")


def test_memory_that_nobody_registered_is_an_error():
    with LocalEngine() as engine, pytest.raises(cpattn.transfer.TransferError) as caught:
        PLAN.execute(engine, engine.session_id)
    assert caught.value.status == -1


def test_names_are_where_users_look():
    assert "TransferError" in cpattn.transfer.__all__
    for name in cpattn.transfer.__all__:
        assert getattr(cpattn.transfer, name).__doc__
    assert {"register", "Registration", "KVLink", "KVLinks"} <= set(cpattn.transfer.__all__)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_travels_with_its_status(protocol):
    error = TransferError("message", TransferStatus(-7, num_batches=3, first_failed_batch=1))
    error.link = "a note of the caller"
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert str(other) == "message"
        assert vars(other.status) == vars(error.status)
        assert (other.status, other.link) == (-7, "a note of the caller")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"timeout": float("nan")}, ValueError, "timeout must be >= 0, got nan"),
        ({"timeout": -1}, ValueError, "timeout must be >= 0, got -1"),
        ({"timeout": "8"}, TypeError, "timeout must be a float, got str"),
        ({"timeout": True}, TypeError, "timeout must be a float, got bool"),
        ({"progress": 1}, TypeError, "progress must be callable, got int"),
    ],
)
def test_arguments_are_checked_before_anything_is_written(arguments, error, message):
    with pytest.raises(error, match=f"^TransferPlan.execute: {message}$"):
        PLAN.execute(Answering(), "peer", **arguments)


def test_no_limit_of_time():
    assert PLAN.execute(Answering(0, 0, 0), "peer", timeout=float("inf")) == 0


def test_lengths_up_to_the_last_byte_of_the_address_space():
    plan = TransferPlan([0] * 3, [0] * 3, [2**64 - 10, 5, 4])
    status = plan.execute(Answering(0, 0, 0), "peer")
    assert (status.num_batches, status.bytes_done) == (2, 2**64 - 1)
