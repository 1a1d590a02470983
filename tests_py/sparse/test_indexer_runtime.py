# SPDX-License-Identifier: Apache-2.0
"""The indexer among threads, its memory, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cpattn
from support.sparse.indexer_cases import make_inputs

# Bytes that the process grew by at most, in a call on so many keys.
MEMORY_OF_A_CALL = """
import numpy as np, cpattn
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
q = np.zeros((256, 1, 16), np.float32)
k = np.zeros(({num_keys}, 16), np.float32)
k += 1
cpattn.set_num_threads(2)
before = peak()
cpattn.sparse.indexer_topk(q, k, q[:, :, 0], [0] * 256, [{num_keys}] * 256, topk=2048)
print(peak() - before)
"""


@pytest.mark.parametrize("num_queries", [1, 20, 100])
def test_the_result_does_not_depend_on_the_number_of_threads(isa, num_queries):
    """Of few queries, several threads take a part of the keys each."""
    inputs = make_inputs(num_queries, 20000, heads=1, dim=32)
    inputs["k"][3000:17000] = inputs["k"][3000]  # ties among parts

    def results(num_threads):
        with cpattn.num_threads(num_threads):
            chosen = [cpattn.sparse.indexer_topk(**inputs, topk=k, sorted=k < 9) for k in (8, 2048)]
            return [cpattn.sparse.indexer_logits(**inputs), *chosen]

    expected = results(1)
    for num_threads in (2, 7):
        assert all(map(torch.equal, results(num_threads), expected))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_keys():
    """Scores of 256 queries and 128 K keys would be 128 MiB."""

    def growth(num_keys):
        script = MEMORY_OF_A_CALL.format(num_keys=num_keys)
        return int(subprocess.check_output([sys.executable, "-c", script]))

    assert growth(128 * 1024) < growth(4 * 1024) + (4 << 20)


BAD_ARGUMENTS = [
    ({"k": torch.zeros(333, 32).bfloat16()}, r"q must have .*dimension of the keys \(32\), got 64"),
    ({"k": torch.zeros(64, 333).bfloat16().T}, r"k must .*contiguous"),
    ({"q": torch.zeros(7, 0, 64).bfloat16()}, r"q must have 1 to 1024 heads, got 0"),
    ({"weights": torch.zeros(7, 2)}, r"weights must have .*\[7, 3\] or that and 1, got \[7, 2\]"),
    ({"weights": torch.zeros(7, 3, 2)}, r"weights must have shape \[7, 3\]"),
    ({"k_scale": torch.zeros(332)}, r"k_scale must have shape \[333\] or \[333, 1\], got \[332\]"),
    ({"ks": [0] * 6}, r"ks and ke must have one entry for each of 7 queries, got 6 and 7"),
    ({"ks": [0, 0, -1, 0, 0, 0, 0]}, r"ks must be >= 0, got -1 at index 2"),
    ({"ke": [0, 333, 334, 0, 0, 0, 0]}, r"ke must be at most the number of keys \(333\), got 334"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARGUMENTS)
def test_what_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cpattn.sparse.indexer_logits(**make_inputs(scales="k_scale" in changes) | changes)


@pytest.mark.parametrize(
    ("dim", "dtype", "multiple"),
    [(72, "bfloat16", 16), (272, "float32", 16), (48, "float8_e4m3fn", 32), (0, "int8", 16)],
)
def test_dimensions_that_are_refused(dim, dtype, multiple):
    inputs = make_inputs(dtype=dtype)
    inputs |= {n: torch.zeros(*inputs[n].shape[:-1], dim).to(inputs[n].dtype) for n in ("q", "k")}
    with pytest.raises(ValueError, match=rf"must be a multiple of {multiple} up to 256, got {dim}"):
        cpattn.sparse.indexer_topk(**inputs, topk=3)


@pytest.mark.parametrize("topk", [0, -1, 1 << 21])
def test_topk_out_of_range(topk):
    with pytest.raises(ValueError, match=rf"indexer_topk: topk must be .*, got {topk}"):
        cpattn.sparse.indexer_topk(**make_inputs(0), topk=topk)
