# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_torch_ops.py, bench_torch_npu.py and bench_threads.py that may be wrong."""

from dataclasses import replace

import pytest

from bench.torch_ops import functions, npu

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
