# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_torch_ops.py, bench_torch_npu.py and bench_threads.py that may be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

import cpattn
from bench.threads import worker
from bench.threads.worker import CALLS, Worker
from bench.torch_ops import calls, functions, npu
from cpattn.profiling import TraceScope

JOBS = list(functions.jobs())
NPU_JOBS = list(npu.jobs())


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_wrong_result_is_found(job):
    def wrong(*tensors):
        result = job.function(*tensors)
        changed = tensors[0] if job.written else result
        changed.view(-1)[0] += 1
        return result

    with pytest.raises(AssertionError):
        replace(job, core=wrong).check()


def test_samples_take_turns():
    order = []
    forms = {name: lambda name=name: order.append(name) for name in "ab"}
    calls.in_turns(forms, rounds=2)
    assert order == 2 * (calls.CALLS * ["a"] + calls.CALLS * ["b"])


def test_a_wrong_result_of_torch_npu_is_found():
    _, function, operator = NPU_JOBS[0]
    with pytest.raises(AssertionError):
        npu.measure(lambda: [x + 1 for x in function()], operator, rounds=1)


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
