# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_torch_ops.py and bench_torch_npu.py that a wrong benchmark would come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.torch_ops import calls, functions, npu

JOBS = list(functions.jobs())
NPU_JOBS = list(npu.jobs())


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_forms_agree(job):
    times = functions.measure(job, rounds=1)
    assert times.keys() == {"core", "function", "operator", "inference"}


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


@pytest.mark.parametrize("job", NPU_JOBS[:-1], ids=lambda job: job[0])
def test_operators_of_torch_npu_give_what_functions_give(job):
    _, function, operator = job
    assert len(npu.measure(function, operator, rounds=1)) == 3


def test_a_wrong_result_of_torch_npu_is_found():
    _, function, operator = NPU_JOBS[0]
    with pytest.raises(AssertionError):
        npu.measure(lambda: [x + 1 for x in function()], operator, rounds=1)
