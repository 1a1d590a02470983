# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a call that may be long within a second, on one thread and on several.

Each call here would take many seconds or minutes, in a process of its own. What it reads is
memory of zeros, most of which is never touched. All other functions: test_threads.py.
"""

from __future__ import annotations

import pytest

from support.interrupts import assert_interruptible

pytestmark = pytest.mark.slow

SCRIPT = """
import numpy as np, cpattn
cpattn.set_num_threads({threads})

def zeros(*shape):
    return np.zeros(shape, np.float32)

{prepare}
print("ready", flush=True)
while True:  # calls that end before the signal comes are made again
    {call}
"""

CALLS = {
    "paged_attention": (
        "cache = zeros(1, 30000, 1, 128); q = zeros(30000, 32, 128)",
        "cpattn.paged_attention(q, cache, cache, q_lens=[30000], kv_lens=[30000], "
        "block_tables=[[0]])",
    ),
    "indexer_topk, of one item": (
        "q = zeros(32, 1024, 16); k = zeros(3000000, 16)",
        "cpattn.sparse.indexer_topk(q, k, q[:, :, 0], [0] * 32, [3000000] * 32, topk=2048)",
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_the_call(name, threads):
    prepare, call = CALLS[name]
    assert_interruptible(SCRIPT.format(threads=threads, prepare=prepare, call=call))
