# SPDX-License-Identifier: Apache-2.0
"""Selections that are right: torch's under a mask, and more of this library's own."""

from __future__ import annotations

import torch

from cpattn import build_cp_metadata
from cpattn.sparse import cp_indexer_topk, topk_transform

RANKS = 3


def by_torch(scores, lengths, topk, row_starts=None):
    """`torch.topk` under a mask."""
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    column = torch.arange(scores.shape[1])[None]
    inside = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    masked = scores.masked_fill(~inside, -torch.inf)
    values, chosen = masked.topk(min(topk, scores.shape[1]), dim=1)
    chosen = torch.where(values == -torch.inf, -1, chosen - starts[:, None])
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def by_topk_transform(scores, lengths, topk, row_starts=None):
    """By index, ascending."""
    return topk_transform(
        scores, topk, method=None, lengths=lengths, row_starts=row_starts, sorted=False
    )


def of_all_ranks(q, k, weights, ks, ke, *, topk):
    """Each row is a sequence of one new token, and ranks share them out."""
    lengths = (ke - ks).tolist()
    tables = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    for row, start, length in zip(tables, ks.tolist(), lengths, strict=True):
        row[:length] = torch.arange(start, start + length)
    out = torch.full((len(lengths), topk), -1, dtype=torch.int32)
    for rank in range(RANKS):
        metadata = build_cp_metadata(
            [1] * len(lengths), lengths, cp_rank=rank, cp_size=RANKS, strategy="interleave"
        )
        mine = list(metadata.local_q_indices)
        if mine:
            out[mine] = cp_indexer_topk(
                q[mine], k[:, None], weights[mine], metadata, block_tables=tables, page_size=1,
                topk=topk,
            )[: len(mine)]  # fmt: skip
    return out
