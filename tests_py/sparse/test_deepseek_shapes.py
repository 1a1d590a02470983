# SPDX-License-Identifier: Apache-2.0
"""Sparse attention is right at the sizes of DeepSeek-V3.2, on every instruction set.

128 heads of 576 and 512 dimensions attend to 2048 chosen keys. Sums are longest at these sizes,
tiles are full, and rows lie all over the pool.
"""

import functools

import numpy as np
import pytest
import torch

import cpattn
from support import probes
from support.cases import DTYPES
from support.tolerances import assert_attended

pytestmark = pytest.mark.slow


HEADS, HEAD_DIM, V_HEAD_DIM, TOPK = 128, 576, 512, 2048
NUM_ROWS = 131079


@functools.cache
def dealt():
    """Return the keys of 16 owners, and the columns of their values; see `probes`."""
    rng = np.random.default_rng(0)
    owners = probes.deal(NUM_ROWS, 16, rng)
    return probes.key_rows(owners, probes.USED, rng), probes.deal_columns(owners, V_HEAD_DIM, rng)


@pytest.fixture(scope="module", params=[*DTYPES, "fp8"])
def pool(request):
    """Return a pool of unit vectors, and the dtype of queries and results."""
    keys, columns = dealt()
    dtype = "bfloat16" if request.param == "fp8" else request.param
    kv = torch.full((NUM_ROWS, 1, HEAD_DIM), 3.0, dtype=getattr(torch, dtype))
    kv[:, 0, :V_HEAD_DIM] = 0
    kv[torch.arange(NUM_ROWS), 0, torch.from_numpy(columns)] = 1
    kv[:, 0, -probes.USED :] = torch.from_numpy(keys).to(kv.dtype)
    if request.param == "fp8":
        return cpattn.sparse.quantize_kv_rows(kv[..., :V_HEAD_DIM], kv[..., V_HEAD_DIM:]), dtype
    return kv, dtype


class Tokens:
    """Queries that see one key in 16 of those that they name, the first and last row included."""

    def __init__(self, num_heads, topk, tokens):
        rng = np.random.default_rng(topk)
        q = probes.query_rows(np.arange(num_heads) % 16, HEAD_DIM)
        self.q = np.stack([q] * tokens)
        self.indices = np.stack([rng.permutation(NUM_ROWS - 2)[:topk] + 1 for _ in self.q])
        self.indices[:, 0], self.indices[:, -1] = NUM_ROWS - 1, 0
        keys, columns = dealt()
        parts = [
            probes.result_of(q, keys[row], columns[row], V_HEAD_DIM)
            for q, row in zip(self.q, self.indices, strict=True)
        ]
        self.expected = probes.expectation(*(np.stack(x) for x in zip(*parts, strict=True)))

    def run(self, kv, dtype):
        q, indices = torch.from_numpy(self.q), torch.from_numpy(self.indices)
        out, _, lse = cpattn.sparse.flash_mla_sparse_fwd(
            q.to(getattr(torch, dtype)), kv, indices, 1.0
        )
        return out, lse


@functools.cache
def tokens_of(*sizes):
    return Tokens(*sizes)


@pytest.mark.parametrize("sizes", [(HEADS, TOPK, 2), (16, 131072, 1)], ids=str)
def test_the_weight_of_every_chosen_key(pool, sizes, isa):
    tokens = tokens_of(*sizes)
    assert_attended(*tokens.run(*pool), tokens.expected, pool[1])
