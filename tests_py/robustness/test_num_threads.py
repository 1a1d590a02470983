# SPDX-License-Identifier: Apache-2.0
"""`num_threads` holds for the calls of one thread, within a with statement or a function."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cpattn
from cpattn import _core

DEFAULT = 2


@pytest.fixture(autouse=True)
def _default_of_the_process():
    before = _core.default_num_threads()
    _core.set_openmp(0)  # torch's threads may have been chosen before, and be one
    cpattn.set_num_threads(DEFAULT)
    yield
    cpattn.set_num_threads(before)


def threads_that_worked() -> int:
    """Count the threads of a call that has enough scores for several."""
    score = np.random.default_rng(0).standard_normal((64, 40_000), np.float32)
    with cpattn.profile() as profile:
        cpattn.sparse.sglang_0_5_23.fast_topk(score, [score.shape[1]] * len(score), 2048)
    return len(profile.threads)


def test_a_call_inside_uses_so_many():
    with cpattn.num_threads(3):
        assert _core.default_num_threads() == 3
        with cpattn.num_threads(1):
            assert _core.default_num_threads() == 1
        with cpattn.num_threads(None):
            assert _core.default_num_threads() == DEFAULT
        assert _core.default_num_threads() == 3
    assert _core.default_num_threads() == DEFAULT


def test_one_is_the_callers_thread():
    # A worker may be late on a busy machine.
    assert any(threads_that_worked() == DEFAULT for _ in range(10_000))
    with cpattn.num_threads(1):
        assert threads_that_worked() == 1


def test_how_long_threads_spin_changes_no_result_and_has_to_be_a_number():
    code = (
        "import numpy as np, cpattn\n"
        "score = np.random.default_rng(0).standard_normal((64, 4000), np.float32)\n"
        "top = cpattn.sparse.sglang_0_5_23.fast_topk(score, [4000] * 64, 100)\n"
        "print(int((top * np.arange(100)).sum()))"
    )

    def child(value: str, variable: str = "CPATTN_SPIN_US") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CPATTN_NUM_THREADS": "2", variable: value}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    right = child("").stdout
    assert int(right) > 0
    assert child("0").stdout == child("1000").stdout == right
    for wrong in ("-1", "1000001", "long"):
        message = f"ValueError: CPATTN_SPIN_US must be a number from 0 to 1000000, got '{wrong}'"
        assert message in child(wrong).stderr
    for variable in ("CPATTN_SPIN_US", "CPATTN_NUM_THREADS", "CPATTN_ISA"):
        assert re.search(rf"ValueError: {variable}.* '\?'", child("\udcff", variable).stderr)


def test_a_function_may_have_it_in_several_threads_at_once():
    barrier = threading.Barrier(2)

    @cpattn.num_threads(7)
    def inside(_: int) -> int:
        barrier.wait()
        return _core.default_num_threads()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(inside, range(2))) == [7, 7]
        assert pool.submit(_core.default_num_threads).result() == DEFAULT


def test_it_ends_with_an_error():
    with pytest.raises(KeyError), cpattn.num_threads(1):
        raise KeyError
    assert _core.default_num_threads() == DEFAULT


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        (0, ValueError, "num_threads: n must be >= 1, got 0"),
        (-3, ValueError, "num_threads: n must be >= 1, got -3"),
        (2**40, ValueError, "num_threads: n must "),
        (1.0, TypeError, "num_threads: n must be an integer, got float"),
        (True, TypeError, "num_threads: n must be an integer, got bool"),
    ],
)
def test_errors(n, error, message):
    with pytest.raises(error, match=f"^{message}"), cpattn.num_threads(n):
        pass
    assert _core.default_num_threads() == DEFAULT
