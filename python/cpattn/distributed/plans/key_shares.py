# SPDX-License-Identifier: Apache-2.0
"""Keys of a batch by the ranks that hold them, for sharded KV pools."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...kv import Placement
from .placed import batch_keys

Array = NDArray[np.int64]


class LocalKeys(NamedTuple):
    """Keys that one rank holds, request after request, in ascending positions."""

    request: Array
    position: Array
    row: Array  # in the pool of the rank


class KeyShares:
    """Keys of all requests, counted and listed for each rank, or for each group of ranks.

    Groups have no pool: rows and pages of their keys have no meaning.
    """

    def __init__(self, placement: Placement, pages: _core.BatchPages) -> None:
        self.pages = pages
        self.kv_lens = pages.kv_lens
        self.keys, self.placed = batch_keys(placement, pages)
        self._group_of = np.arange(self.keys.num_ranks)
        self._remember()

    def _remember(self) -> None:
        self.share = cache(self._share)
        self.local_keys = cache(self._local_keys)
        self.local_pages = cache(self._local_pages)
        self.positions = cache(self._positions)

    def of_groups(self, group_of: Array) -> KeyShares:
        """Return the shares of groups of ranks; `group_of` has the group of each rank."""
        shares = object.__new__(KeyShares)
        shares.__dict__.update(self.__dict__)
        shares._group_of = group_of[: self.keys.num_ranks]
        shares._remember()
        return shares

    def count_below(self, rank: int, request: Array, position: Array) -> Array:
        """Count, for each pair of a request and a position, the rank's keys before the position.

        A position is at most the length of the request.
        """
        return self.share(rank).count_below(request, position)

    def counts(self, rank: int) -> Array:
        """Return the number of keys of each request that the rank holds."""
        return self.share(rank).counts()

    def _share(self, rank: int) -> _core.KeyShare:
        return _core.KeyShare(self.keys, np.flatnonzero(self._group_of == rank))

    def _local_keys(self, rank: int) -> LocalKeys:
        return LocalKeys(*self.share(rank).local_keys())

    def _positions(self, rank: int) -> tuple[NDArray[np.int32], Array]:
        """Return the positions of a rank's keys, and the begin of each request among them."""
        counts = self.counts(rank)
        return self.local_keys(rank).position.astype(np.int32), np.cumsum(counts) - counts

    def _local_pages(self, rank: int) -> _core.LocalPages:
        """Return pages as large as runs of keys allow, or as several adjacent runs."""
        return self.share(rank).local_pages()
