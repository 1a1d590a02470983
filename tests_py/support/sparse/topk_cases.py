# SPDX-License-Identifier: Apache-2.0
"""Rows of scores, top-k by a sort that is obviously right, and the kinds of its transform."""

import numpy as np

RAGGED = {"fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"}
PAGED = {"fp8_kv_cache": False, "prefill_impl": "flashmla_sparse"}


def expected_topk(score, lengths, topk, row_starts=None, *, sorted=True):
    """[B, topk] by a stable sort of each row: ties keep the order of their indices."""
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


def adversarial_rows(columns):
    """Rows by name that force ties, mislead samples or hold what is not a number."""
    normal = random_scores(1, columns)[0]
    index = np.arange(columns)
    special = np.float32([np.inf, -np.inf, np.nan, -np.nan, 0.0, -0.0, 1e-42, -1e-42])
    rows = {
        "all equal": np.full(columns, 1.5),
        "all -inf": np.full(columns, -np.inf),
        "all +inf": np.full(columns, np.inf),
        "all NaN": np.full(columns, np.nan),
        "ascending": np.sort(normal),
        "descending": np.sort(normal)[::-1],
        "100 winners in a flood of zeros": np.where(index % 83 == 3, 1 + index, 0)
        * (np.cumsum(index % 83 == 3) <= 100),
        "both zeros": np.where(index % 2 == 0, -0.0, 0.0),
        "both zeros above negative ones": np.where(index % 3 == 0, -1.0, 0.0 * (-1.0) ** index),
        "five values": np.round(normal),
        "5000 in one bucket": np.where(index < 5000, 1 + index % 7 * 2.0**-23, normal - 9),
        "2049 ties for the last places": np.where(index % 4 == 1, 2.0, normal - 9),
        "special numbers": np.where(index % 3 == 0, special[index // 3 % 8], normal),
        "high where nobody looks": np.where(index < columns // 2, normal + 10, -np.inf),
        "samples are high": np.where(index % (columns // 512 or 1) == 0, 100 + index, normal),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}
