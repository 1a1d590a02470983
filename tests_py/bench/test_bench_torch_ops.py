# SPDX-License-Identifier: Apache-2.0
"""The parts of bench_torch_ops.py that a wrong benchmark would come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.torch_ops import calls, functions

JOBS = list(functions.jobs())


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


def test_bars_grow_with_the_tensors():
    assert [job.function_bar for job in JOBS] == pytest.approx([1.4, 1.8, 1.1])
