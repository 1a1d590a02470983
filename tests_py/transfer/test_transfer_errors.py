# SPDX-License-Identifier: Apache-2.0
"""No transfer fails silently: codes become errors, and what is no code is refused."""

from __future__ import annotations

import copy
import pickle
import re

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


@pytest.mark.parametrize("answer", [None, True, False, 0.0, "0"])
@pytest.mark.parametrize("check", [True, False])
def test_what_is_no_code_is_no_success(answer, check):
    message = rf"write must return an integer code, 0 for success, got {type(answer).__name__}"
    with pytest.raises(TypeError, match=message) as caught:
        PLAN.execute(Answering(0, answer), "peer", check=check)
    assert caught.value.transfer_status.blocks_done == 2


def test_engines_that_look_at_codes_have_them_returned():
    for codes, failed, blocks in (((-7,), 0, 0), ((0, -7), 1, 2), ((0, 0, 0), None, 5)):
        status = PLAN.execute(Answering(*codes), "peer", check=False, timeout=float("inf"))
        assert (int(status), status.first_failed_batch) == (codes[-1], failed)
        assert (status.blocks_done, status.bytes_done) == (blocks, 8 * blocks)
        assert (status.num_batches, status.attempts) == (3, len(codes))


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
    assert type(int(PLAN.execute(Answering(*np.zeros(3, np.int32)), "peer"))) is int
    with pytest.raises(TransferError, match="code -3 "):
        PLAN.execute(Answering(np.int64(-3)), "peer")
    assert TransferPlan([], [], []).execute(Answering(), "peer") == 0  # which asks nobody


def test_memory_that_nobody_registered_is_an_error():
    with LocalEngine() as engine, pytest.raises(cpattn.transfer.TransferError) as caught:
        PLAN.execute(engine, engine.session_id)
    assert caught.value.status == -1


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
        PLAN.execute(Answering(), "peer", **arguments)


def test_lengths_up_to_the_last_byte_of_the_address_space():
    plan = TransferPlan([0] * 3, [0] * 3, [2**64 - 10, 5, 4])
    status = plan.execute(Answering(0, 0, 0), "peer")
    assert (status.num_batches, status.bytes_done) == (2, 2**64 - 1)
