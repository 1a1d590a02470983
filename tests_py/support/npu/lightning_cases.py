# SPDX-License-Identifier: Apache-2.0
"""Batches of the lightning indexer, in all its layouts."""

from __future__ import annotations

import numpy as np
import torch

from support.npu import layouts
from support.sparse.indexer_batch import integers, scores_of, top_of

FORMS = [("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND")]
Q_LENS, K_LENS = (5, 1, 0, 7), (20, 17, 9, 3)  # the last sequence has more queries than keys
BLOCK_SIZE, HEADS, DIM, TOPK = 16, 3, 32, 6


class Operator:
    """A batch in the layouts of a call, NaN wherever it must not read."""

    def __init__(self, form, q_lens=Q_LENS, k_lens=K_LENS, dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        self.q_lens, self.k_lens, self.dtype = q_lens, k_lens, dtype
        self.layout_query, self.layout_key = form
        self.q = [integers(rng, (n, HEADS, DIM)) for n in q_lens]
        self.weights = [integers(rng, (n, HEADS), -3, 4) for n in q_lens]
        self.k = [integers(rng, (n, 1, DIM)) for n in k_lens]

    def lay_out(self, parts, layout):
        parts = [torch.from_numpy(part) for part in parts]
        if layout == "TND":
            return torch.cat([*parts, torch.full((2, *parts[0].shape[1:]), torch.nan)])
        return layouts.padded(parts, 2)

    def blocks(self):
        table = layouts.tables_of(self.k_lens, BLOCK_SIZE, np.random.default_rng(1))
        return layouts.blocks_of([torch.from_numpy(k) for k in self.k], table, BLOCK_SIZE), table

    def arguments(self, **changes):
        paged = self.layout_key == "PA_BSND"
        packed = self.layout_query == "TND"
        key, table = self.blocks() if paged else (self.lay_out(self.k, self.layout_key), None)
        arguments = {"query": self.lay_out(self.q, self.layout_query).to(self.dtype)}
        arguments |= {"key": key.to(self.dtype), "block_table": table, "sparse_count": TOPK}
        arguments["weights"] = self.lay_out(self.weights, self.layout_query)
        arguments |= {"layout_query": self.layout_query, "layout_key": self.layout_key}
        arguments["actual_seq_lengths_query"] = layouts.ends_of(self.q_lens, packed)
        arguments["actual_seq_lengths_key"] = layouts.ends_of(self.k_lens, packed and not paged)
        return arguments | changes

    def expected(self, mode):
        """Indices and values, laid out; nothing but -1 and -inf in spare rows."""
        tops, values = [], []
        for q, weights, k in zip(self.q, self.weights, self.k, strict=True):
            tops.append(np.full((len(q), 1, TOPK), -1, np.int32))
            values.append(np.full((len(q), 1, TOPK), -np.inf, np.float32))
            for i in range(len(q)):
                end = len(k) if mode == 0 else max(len(k) - len(q) + i + 1, 0)
                scores = scores_of(q[i], weights[i], k[:end, 0])
                top = top_of(scores, TOPK)
                tops[-1][i, 0] = top
                values[-1][i, 0, top >= 0] = scores[top[top >= 0]]
        indices = self.lay_out([top.astype(np.float32) for top in tops], self.layout_query)
        values = self.lay_out(values, self.layout_query)
        return indices.nan_to_num(-1).int(), values.nan_to_num(-torch.inf, neginf=-torch.inf)

    def check(self, result, mode=3, values=False):
        indices, scores = self.expected(mode)
        assert result[0].dtype == torch.int32
        assert torch.equal(result[0], indices)
        assert result[1].dtype == self.dtype
        if values:
            assert torch.equal(result[1], scores.to(self.dtype))
        else:
            assert result[1].shape == (0,)
