# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in plain torch: scores of 16 queries at a time, topk, then row by row.

These are torch's fastest forms: products of more rows exceed the cache, and SDPA over gathered keys
takes twice to three times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor

from ..dense.baseline import Segment

Load: TypeAlias = Callable[[Tensor], Tensor]  # rows [n, dim] at n pool rows
_QUERIES = 16  # their products with all keys are in memory at once


def index_scores(q: Tensor, k: Tensor, weights: Tensor, lens: Tensor) -> Tensor:
    """Return scores [n, len(k)] of queries with their first `lens` keys, -inf for other keys.

    q [n, heads, dim], k [keys, dim] and weights [n, heads] have one dtype; so do the products.
    """
    products = (q.flatten(0, 1) @ k.T).relu_().unflatten(0, q.shape[:2])
    scores = torch.bmm(weights[:, None], products)[:, 0]
    return scores.masked_fill_(torch.arange(len(k)) >= lens[:, None], -torch.inf)


def choose_keys(
    q: Tensor,
    weights: Tensor,
    segments: list[Segment],
    load_keys: Load,
    topk: int,
    clock: Callable[[str], AbstractContextManager[None]],
) -> Tensor:
    """Return pool rows [rows, topk] of the keys with the largest scores, -1 in the tail.

    `load_keys` returns the keys [n, dim] of the indexer at n pool rows.
    """
    slots = torch.full((len(q), topk), -1)
    for segment in segments:
        with clock("indexer"):
            keys = load_keys(segment.slots)
        first = segment.rows.start
        for begin in range(first, segment.rows.stop, _QUERIES):
            rows = slice(begin, min(begin + _QUERIES, segment.rows.stop))
            lens = segment.lens[begin - first : rows.stop - first]
            seen = int(lens[-1])
            with clock("indexer"):
                scores = index_scores(q[rows], keys[:seen], weights[rows], lens)
            with clock("top-k"):
                count = min(topk, seen)
                best = scores.topk(count, dim=-1, sorted=False)
                found = segment.slots[best.indices].masked_fill_(best.values == -torch.inf, -1)
                slots[rows, :count] = found
    return slots


def attend_chosen(
    q: Tensor,
    slots: Tensor,
    load_rows: Load,
    *,
    v_dim: int,
    scale: float,
) -> Tensor:
    """Return attention [rows, heads, v_dim] of q [rows, heads, dim] to the pool rows in `slots`.

    `load_rows` returns the latent rows [n, dim] at n pool rows; `slots` has -1 in unused tails.
    """
    out = q.new_empty(*q.shape[:2], v_dim)
    for i, count in enumerate((slots >= 0).sum(1).tolist()):
        keys = load_rows(slots[i, :count])
        weights = torch.softmax((q[i] @ keys.T).float() * scale, -1)
        torch.mm(weights.to(q.dtype), keys[:, :v_dim], out=out[i])
    return out
