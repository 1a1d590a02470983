# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_torch_ops.py, bench_torch_npu.py and bench_threads.py that may be wrong."""

from dataclasses import replace

import pytest

import cpattn
from bench.threads.worker import CALLS, Worker
from bench.torch_ops import functions, npu
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
