# SPDX-License-Identifier: Apache-2.0
"""paged_attention among threads, processes, signals and very large tensors."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import cpattn
from support.cases import Case, assert_attention, make_inputs
from support.interrupts import assert_interruptible

pytestmark = pytest.mark.slow


MANY_ITEMS = Case(q_lens=(33, 1, 70), kv_lens=(90, 300, 70), num_heads=8, dtype="bfloat16")

# A call of minutes if it were left alone, in a process of its own.
LONG_CALL = """
import numpy as np, cpattn
q = np.zeros((30000, 32, 128), np.float32)
cache = np.zeros((1, 30000, 1, 128), np.float32)
print("ready", flush=True)
cpattn.paged_attention(q, cache, cache, q_lens=[30000], kv_lens=[30000], block_tables=[[0]],
                       num_threads={threads})
"""


def test_the_result_does_not_depend_on_the_number_of_threads(isa):
    inputs = make_inputs(MANY_ITEMS)
    results = [
        cpattn.paged_attention(**inputs, num_threads=n, return_lse=True) for n in (1, 2, 3, 7)
    ]
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_row_does_not_depend_on_its_batch(isa):
    """The same sequence alone, beside others, and its last row alone."""
    inputs = make_inputs(MANY_ITEMS) | {"batch_invariant": True}
    whole = cpattn.paged_attention(**inputs)
    row = 34
    alone = inputs | {
        "q": inputs["q"][row:],
        "q_lens": [70],
        "kv_lens": [70],
        "block_tables": inputs["block_tables"][2:],
    }
    assert torch.equal(cpattn.paged_attention(**alone), whole[row:])
    last = alone | {"q": inputs["q"][-1:], "q_lens": [1]}
    assert torch.equal(cpattn.paged_attention(**last), whole[-1:])


def test_several_python_threads_at_once():
    batches = [make_inputs(MANY_ITEMS, seed) for seed in range(4)]
    expected = [cpattn.paged_attention(**inputs) for inputs in batches]
    failures = []

    def work(index):
        for _ in range(5):
            if not torch.equal(cpattn.paged_attention(**batches[index]), expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Python warns about any fork of a process with threads; surviving one is the point here.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_too():
    inputs = make_inputs(MANY_ITEMS.with_(dtype="float32"))
    for name in ("q", "k_cache", "v_cache"):
        inputs[name] = inputs[name].numpy()  # torch itself may hang in a forked child
    expected = cpattn.paged_attention(**inputs, num_threads=2)  # the parent's pool is running
    child = os.fork()
    if child == 0:
        same = np.array_equal(cpattn.paged_attention(**inputs, num_threads=2), expected)
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 30
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0
    np.testing.assert_array_equal(cpattn.paged_attention(**inputs, num_threads=2), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_long_call(threads):
    assert_interruptible(LONG_CALL.format(threads=threads))


def test_query_rows_far_apart(tmp_path):
    """Rows of 2^30 elements, in a sparse file."""
    inputs = make_inputs(Case(q_lens=(3,), kv_lens=(20,), dtype="float16"))
    rows = np.memmap(tmp_path / "q", dtype=np.float16, mode="w+", shape=(3, 2**30))
    q = torch.from_numpy(rows)[:, : 4 * 64].unflatten(1, (4, 64))
    q.copy_(inputs["q"])
    assert_attention(*cpattn.paged_attention(**inputs | {"q": q}, return_lse=True), inputs)
