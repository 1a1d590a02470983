# SPDX-License-Identifier: Apache-2.0
"""Functions of sparse attention called from several Python threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import cpattn
from support.sparse.indexer_cases import make_inputs
from support.sparse.topk_cases import random_scores


def topk(seed):
    score = random_scores(40, 5000, seed)
    return cpattn.sparse.fast_topk_transform_ragged_fused(score, [5000] * 40, [seed] * 40, 600)


def indexer(seed):
    return cpattn.sparse.indexer_topk(**make_inputs(40, 700, heads=4, dim=64, seed=seed), topk=100)


def rows(seed):
    x = torch.from_numpy(random_scores(300, 576, seed))
    return cpattn.sparse.dequantize_kv_rows(cpattn.sparse.quantize_kv_rows(x[:, :512], x[:, 512:]))


def attention(seed):
    kv = torch.from_numpy(random_scores(500, 64, seed))
    indices = np.random.default_rng(seed).integers(-1, 500, (20, 200))
    return cpattn.sparse.flash_mla_sparse_fwd(
        kv[:80].view(20, 4, 64), kv[:, None], indices, 0.2, d_v=48
    )


def norm(seed):
    x = torch.from_numpy(random_scores(500, 56, seed))
    return cpattn.sparse.fused_split_qk_norm(x, torch.ones(32), torch.ones(16), 32, 16, 8)


@pytest.mark.parametrize("call", [topk, indexer, rows, attention, norm], ids=lambda f: f.__name__)
def test_several_python_threads_at_once(call):
    expected = [call(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            for result, alone in zip(threads.map(call, range(4)), expected, strict=True):
                torch.testing.assert_close(result, alone, rtol=0, atol=0)
