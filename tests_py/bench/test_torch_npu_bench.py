# SPDX-License-Identifier: Apache-2.0
"""bench_torch_npu.py compares calls that give the same."""

from __future__ import annotations

import pytest

from bench.torch_ops import npu

JOBS = list(npu.jobs())


@pytest.mark.parametrize("job", JOBS[:-1], ids=lambda job: job[0])
def test_operators_give_what_functions_give(job):
    _, function, operator = job
    assert len(npu.measure(function, operator, rounds=1)) == 3


def test_a_wrong_result_is_found():
    _, function, operator = JOBS[0]
    with pytest.raises(AssertionError):
        npu.measure(lambda: [x + 1 for x in function()], operator, rounds=1)
