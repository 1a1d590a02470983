# SPDX-License-Identifier: Apache-2.0
"""Selection of the keys with the best scores among the keys of all ranks.

Each rank selects the best of its own keys, which include all its keys among the overall best. A
candidate is an int64 that grows with the score; for equal scores, the smaller position gives the
larger candidate. No two candidates are equal, so the largest ones are exactly the keys, in order,
that `cpattn.sparse.cp_indexer_topk` selects from one pool, in any order of arrival.
"""

from __future__ import annotations

import numpy as np
import torch

from ... import _core
from ..plans.key_shares import Array, KeyShares
from .inputs import SparseInputs

_LOW = (1 << 31) - 1  # a candidate holds this minus the position
_NONE = -(1 << 63)  # below all candidates


class LocalIndex:
    """Index keys of a batch that a rank holds, one after the other."""

    def __init__(self, inputs: SparseInputs, shares: KeyShares, rank: int) -> None:
        keys = shares.local_keys(rank)
        self._shares, self._rank = shares, rank
        self._position = torch.from_numpy(keys.position)
        self._begin = np.searchsorted(keys.request, np.arange(len(shares.kv_lens)))
        self._keys, self._scale = inputs.take_index(torch.from_numpy(keys.row))

    def candidates(
        self, q: torch.Tensor, weights: torch.Tensor, request: Array, visible: Array, width: int
    ) -> torch.Tensor:
        """Return each row's best keys among those before `visible`: int64 [rows, width]."""
        begin = self._begin[request]
        count = self._shares.count_below(self._rank, request, visible)
        indices = q.new_empty(len(q), width, dtype=torch.int32)
        scores = q.new_empty(len(q), width, dtype=torch.float32)
        _core.indexer_topk(
            q, self._keys, weights, begin, begin + count, self._scale, False, indices, scores
        )
        missing = indices < 0
        if not len(self._position):
            return indices.new_full(indices.shape, _NONE, dtype=torch.int64)
        where = (indices + torch.from_numpy(begin)[:, None]).masked_fill_(missing, 0)
        return _packed(scores, self._position[where]).masked_fill_(missing, _NONE)


def candidate_width(shares: KeyShares, size: int, request: Array, visible: Array, topk: int) -> int:
    """Return the most candidates of a row that a rank can have, over all rows and ranks."""
    counts = [shares.count_below(rank, request, visible).max() for rank in range(size)]
    return min(topk, int(max(counts)))


def _packed(scores: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Pack score, which is never NaN, and position into one number; -0 equals +0."""
    bits = (scores + 0.0).view(torch.int32)
    ascending = bits ^ ((bits >> 31) & _LOW)
    return (ascending.long() << 32) | (_LOW - position)


def best_positions(candidates: torch.Tensor, topk: int) -> torch.Tensor:
    """Return positions [rows, topk] of the best of [rows, n], score descending; -1 for none."""
    best = candidates.topk(topk, dim=1).values
    positions = _LOW - (best & 0xFFFFFFFF)
    return positions.masked_fill_(best == _NONE, -1).int()


def all_positions(visible: Array, topk: int) -> torch.Tensor:
    """Return positions [rows, topk] of rows that select all visible keys, ascending, then -1."""
    positions = torch.arange(topk, dtype=torch.int32, device="cpu").expand(len(visible), topk)
    return positions.masked_fill(positions >= torch.from_numpy(visible)[:, None], -1)


def rows_of_rank(
    shares: KeyShares, rank: int, request: Array, positions: torch.Tensor
) -> torch.Tensor:
    """Return the rows of selected keys in a rank's pool, int32; -1 for keys of other ranks."""
    return torch.from_numpy(shares.share(rank).rows_of(request, positions))
