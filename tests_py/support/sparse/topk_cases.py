# SPDX-License-Identifier: Apache-2.0
"""Rows of scores, top-k by an obviously correct sort, and the kinds of its transform."""

import numpy as np

RAGGED = {"fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"}
PAGED = {"fp8_kv_cache": False, "prefill_impl": "flashmla_sparse"}


def expected_topk(score, lengths, topk, row_starts=None, *, sorted=True):
    """Return [B, topk] by a stable sort of each row: ties keep the order of their indices."""
    out = np.full((len(lengths), topk), -1, np.int32)
    for i, length in enumerate(lengths):
        start = 0 if row_starts is None else row_starts[i]
        candidates = np.asarray(score[i])[start : start + max(length, 0)]
        chosen = np.arange(len(candidates))
        if length > topk:
            ranked = np.where(np.isnan(candidates), -np.inf, candidates)
            chosen = np.argsort(-ranked, kind="stable")[:topk]
            if not sorted:
                chosen = np.sort(chosen)
        out[i, : len(chosen)] = chosen
    return out


def random_scores(rows, columns, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
