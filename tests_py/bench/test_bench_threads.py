# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_threads.py that a wrong benchmark would come from."""

from __future__ import annotations

import pytest

import cpattn
from bench.threads import worker
from bench.threads.worker import CALLS, Worker
from cpattn.profiling import TraceScope


@pytest.fixture
def two_threads():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads(), cpattn._core.default_num_threads()
    yield Worker(2, "cpattn")
    torch.set_num_threads(before[0])
    cpattn.set_num_threads(before[1])


@pytest.mark.parametrize("call", CALLS)
def test_a_call_has_work_for_two_threads(two_threads, call):
    asked = two_threads._calls[call]
    with cpattn.profile() as profile:
        asked()
    assert len(profile.select(TraceScope.item)) >= 2


def test_the_pause_before_a_call_is_not_counted(monkeypatch):
    clock = iter([0.0, 0.05, 0.2, 5.0, 7.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    assert worker.taken(lambda: None, pause=0.1) == 2


def test_every_measurement_answers(two_threads):
    (call, *_) = CALLS
    timed = {"median", "ninetieth"}
    assert two_threads.after_pauses(call, 0.0, 5).keys() == timed
    assert two_threads.calls_for(0.01, call, 1e-5).keys() == timed
    assert two_threads.products(0.01)["rate"] > 0
    assert {k: v.keys() for k, v in two_threads.in_turn(call, 5).items()} == {
        "call": timed,
        "product": timed,
        "both": timed,
    }
