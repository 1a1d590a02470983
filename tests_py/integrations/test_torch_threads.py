# SPDX-License-Identifier: Apache-2.0
"""Calls on the threads of torch's OpenMP have their number and places, and equal bits."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cpattn
from cpattn import _core

torch = pytest.importorskip("torch")

from cpattn.integrations import _torch_threads  # noqa: E402
from cpattn.integrations.torch_threads import set_thread_pool  # noqa: E402

OWN = "cpattn worker\n"  # the system's name for threads of the pool


@pytest.fixture(autouse=True)
def _restored():
    threads, own = torch.get_num_threads(), _core.default_num_threads()
    yield
    set_thread_pool("cpattn")
    cpattn.set_num_threads(own)
    torch.set_num_threads(threads)


def attention(threads: int | None = None) -> np.ndarray:
    """Attend with 64 rows for each of 8 sequences: work for several threads."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((512, 4, 32), np.float32)
    cache = rng.standard_normal((16, 64, 4, 32), np.float32)
    tables = np.arange(16, dtype=np.int32).reshape(8, 2)
    lens = {"q_lens": [64] * 8, "kv_lens": [128] * 8, "block_tables": tables}
    with cpattn.num_threads(threads):
        return cpattn.paged_attention(q, cache, cache[::-1].copy(), **lens)


@pytest.mark.parametrize(("of_torch", "threads"), [(1, 5), (2, 1), (3, 2), (3, 5)])
def test_results_have_the_same_bits(of_torch, threads):
    expected = attention(threads)
    torch.set_num_threads(of_torch)
    set_thread_pool("torch")
    assert np.array_equal(attention(threads), expected)


def reaches(threads: int, most: int) -> bool:
    """Return whether `most` threads work in one of 50 calls; no call may have more."""
    for _ in range(50):
        with cpattn.profile() as profile:
            attention(threads)
        assert len(profile.threads) <= most
        if len(profile.threads) == most:
            return True
    return False


def test_a_call_has_the_threads_of_torch_and_no_more_than_its_own():
    torch.set_num_threads(3)
    set_thread_pool("torch")
    assert reaches(8, 3)
    assert reaches(2, 2)
    assert reaches(1, 1)
    torch.set_num_threads(1)
    assert reaches(8, 1)


def test_several_threads_may_call_at_once():
    set_thread_pool("torch")
    expected = attention()
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(attention, [2] * 80))
    assert all(np.array_equal(result, expected) for result in results)


def test_errors():
    set_thread_pool("torch")
    for pool, error, message in (
        ("own", ValueError, r"pool must be one of \('cpattn', 'torch'\), got 'own'"),
        (None, TypeError, "pool must be a str, got NoneType"),
    ):
        with pytest.raises(error, match=f"^set_thread_pool: {message}$"):
            set_thread_pool(pool)
        assert _core.uses_openmp()


def test_a_torch_with_other_threads_is_an_error(monkeypatch):
    backend = "ATen parallel backend: native thread pool"
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: backend)
    with pytest.raises(RuntimeError, match=r"^set_thread_pool: torch .* has no threads of OpenMP"):
        set_thread_pool("torch")
    assert not _core.uses_openmp()


THREADS = """
import os, sys, time, torch
everywhere = os.sched_getaffinity(0)
torch.set_num_threads(3)
torch.ones(1 << 20).sum()                    # OpenMP's threads are anywhere
os.sched_setaffinity(0, {min(everywhere)})   # as OpenMP binds the first when vLLM asks it to
from cpattn import _core
from cpattn.integrations._torch_threads import follow_torch_threads
follow_torch_threads()
assert os.sched_getaffinity(0) == {min(everywhere)}
wanted = 0 if _core.uses_openmp() else _core.default_num_threads() - 1
helpers = []
while len(helpers) < wanted:  # they get their name when they first run
    time.sleep(0.01)
    helpers = [
        os.sched_getaffinity(int(thread))
        for thread in os.listdir("/proc/self/task")
        if open(f"/proc/self/task/{thread}/comm").read() == sys.argv[1]
    ]
assert helpers == [everywhere] * wanted, helpers
print(_core.default_num_threads(), _core.uses_openmp())
"""


def follow(**variables: str) -> subprocess.CompletedProcess[str]:
    chosen = {"CPATTN_NUM_THREADS", _torch_threads.VARIABLE}
    environment = {k: v for k, v in os.environ.items() if k not in chosen} | variables
    command = [sys.executable, "-c", THREADS, OWN]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("pool", "given", "threads", "openmp"),
    [("torch", "2", 2, True), ("", "", 3, True), ("cpattn", "2", 2, False)],
)
def test_threads_of_an_engine_are_as_many_as_torch_has(pool, given, threads, openmp):
    variables = {"CPATTN_NUM_THREADS": given} if given else {}
    child = follow(**variables, CPATTN_THREAD_POOL=pool)
    assert child.stderr == ""
    assert child.stdout.split() == [str(threads), str(openmp)]


def test_a_process_of_torchrun_keeps_its_threads(monkeypatch):
    monkeypatch.delenv(_torch_threads.VARIABLE, raising=False)
    for of_torch in (1, 2):
        set_thread_pool("cpattn")
        torch.set_num_threads(of_torch)
        cpattn.set_num_threads(2)
        _torch_threads.use_torch_threads()
        assert _core.uses_openmp() == (of_torch > 1)


def test_another_pool_of_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv(_torch_threads.VARIABLE, "openmp")
    message = r"^CPATTN_THREAD_POOL must be one of \('cpattn', 'torch'\), got 'openmp'$"
    with pytest.raises(ValueError, match=message):
        _torch_threads.use_torch_threads()
