# SPDX-License-Identifier: Apache-2.0
"""A signal handler may make calls in the middle of a call on the same thread, which looks for
signals about every 50 ms. test_threads.py tests Ctrl-C, and
tests_cpp/attention/kernel_calls_test.cc calls in the middle of attention."""

import signal
import time

import numpy as np
import pytest
import torch

import cpattn
from cpattn._containers import empty
from cpattn.sparse import sglang_0_5_23
from support.cases import Case, make_inputs

pytestmark = pytest.mark.slow


LONG_ENOUGH = 0.15  # a call of so many seconds looks for signals


def long_indexer(dtype):
    """Return a call of the indexer with enough rows to take that long, and its result."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(4096, 128, generator=generator).to(dtype)
    rows, seconds = 2, 0.0
    while seconds < LONG_ENOUGH:
        rows *= 2
        q = torch.randn(rows, 64, 128, generator=generator).to(dtype)
        arguments = q, k, torch.rand(rows, 64, generator=generator), [0] * rows, [4096] * rows
        begin = time.monotonic()
        expected = cpattn.sparse.indexer_topk(*arguments, topk=512)
        seconds = time.monotonic() - begin
    return lambda: cpattn.sparse.indexer_topk(*arguments, topk=512), expected


@pytest.fixture
def timer():
    """Return a function that calls its argument from signals, and returns the count of calls."""
    count = [0]

    def start(call):
        def handler(number, frame):
            count[0] += 1
            call()
            arm()

        def arm():
            """Start the timer when a call ends, so that even a slow outer call goes on."""
            signal.setitimer(signal.ITIMER_REAL, 0.03)

        signal.signal(signal.SIGALRM, handler)
        arm()
        return count

    before = signal.getsignal(signal.SIGALRM)
    yield start
    signal.signal(signal.SIGALRM, signal.SIG_IGN)  # no handler starts the timer again
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_from_a_signal_handler_disturb_nothing(isa, timer, dtype):
    outer, expected_of_outer = long_indexer(dtype)
    nested_inputs = make_inputs(Case(q_lens=(40,), kv_lens=(300,), dtype="bfloat16"))
    score = torch.randn(2, 9000, generator=torch.Generator().manual_seed(1))
    wide = make_inputs(Case(q_lens=(3,), kv_lens=(500,), head_dim=256))

    def nested():
        return (
            cpattn.paged_attention(**nested_inputs),
            cpattn.paged_attention(**wide),
            sglang_0_5_23.fast_topk(score, [9000] * 2, 2048),
        )

    expected = nested()
    results = []
    count = timer(lambda: results.append(nested()))
    for _ in range(50):
        result = outer()
        if count[0] >= 2:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert count[0] >= 2
    assert torch.equal(result, expected_of_outer)
    for nested_result in results:
        assert all(map(torch.equal, nested_result, expected))


def test_an_error_of_a_handler_is_not_taken_for_a_lack_of_memory():
    class Interrupted:
        def __index__(self):  # stands for a handler during an allocation
            raise RuntimeError("too deep")

    with pytest.raises(RuntimeError, match=r"^too deep$"):
        empty("f", np.zeros(1), [Interrupted()])
