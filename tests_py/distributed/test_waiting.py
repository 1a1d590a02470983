# SPDX-License-Identifier: Apache-2.0
"""Waits for messages: which of them take a thread, and for how long they are looked for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cpattn.distributed.transport.waiting import NOT_YET, Posted, Wait, have_come
from support.distributed.disagreements import run_agreements
from support.distributed.distributed_worker import run_world
from support.time_limits import BUSY


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return {size: run_world(size, tmp_path_factory.mktemp("w"), run_agreements) for size in (2, 3)}


@pytest.mark.parametrize("size", [2, 3])
def test_an_agreement_needs_a_thread_only_for_who_is_late_and_beside_rows(worlds, size):
    for first, missed, beside, last in worlds[size]:
        for case in (first, missed, beside, last):
            wanted = [[[rank, turn, 0] for rank in range(size)] for turn in range(5)]
            assert case["told"] == wanted
        assert first["threads"] == last["threads"] == 0
        assert missed["threads"] == 5
        assert beside["threads"] == 6  # and the rows themselves
        assert beside["ahead"] == [list(range(size))]


class Work:
    """Notes where it was waited for, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.thread = error, None

    def wait(self, longest=None) -> None:
        self.thread = threading.current_thread()
        if self.error:
            raise self.error


@pytest.mark.parametrize("over_soon", [True, False])
def test_what_is_over_soon_is_awaited_in_the_calling_thread(over_soon):
    works = [(1, Work(RuntimeError("closed"))), (2, Work()), (1, Work())]
    posted = Posted("test", works)
    wait = Wait(posted, 60.0, over_soon=over_soon)
    wait.join(BUSY)
    assert wait.is_over()
    assert list(posted.failures) == [1]
    threads = [work.thread for _, work in works]
    assert (threads[1] is threading.current_thread()) is over_soon
    assert threads[2] is None  # of a rank that has failed


def test_messages_are_looked_for_by_their_last_numbers():
    ends = np.array([5, NOT_YET, 0])
    assert not have_come(None)
    begin = time.monotonic()
    assert not have_come(ends)
    assert time.monotonic() - begin >= 0.002
    ends[1] = -1
    assert have_come(ends)
    assert have_come(ends[:0])
