# SPDX-License-Identifier: Apache-2.0
"""The keys of a batch by the ranks that hold them, where KV pools are sharded."""

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
    """The keys that one rank holds, request after request, in ascending positions."""

    request: Array
    position: Array
    row: Array  # of the pool of the rank


class KeyShares:
    """The keys of all requests, counted and listed for each rank, or for each group of ranks.

    Keys of groups are in no pool: their rows and pages say nothing.
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
        """Return the shares of groups of ranks, of which `group_of` has one for each rank."""
        shares = object.__new__(KeyShares)
        shares.__dict__.update(self.__dict__)
        shares._group_of = group_of[: self.keys.num_ranks]
        shares._remember()
        return shares

    def count_below(self, rank: int, request: Array, position: Array) -> Array:
        """Count the keys before a position of its request that the rank holds, for each pair.

        Positions are at most the length of the request.
        """
        return self.share(rank).count_below(request, position)

    def counts(self, rank: int) -> Array:
        """Count the keys of each request that the rank holds."""
        return self.share(rank).counts()

    def _share(self, rank: int) -> _core.KeyShare:
        return _core.KeyShare(self.keys, np.flatnonzero(self._group_of == rank))

    def _local_keys(self, rank: int) -> LocalKeys:
        return LocalKeys(*self.share(rank).local_keys())

    def _positions(self, rank: int) -> tuple[NDArray[np.int32], Array]:
        """Positions of the keys of a rank, and where those of each request begin."""
        counts = self.counts(rank)
        return self.local_keys(rank).position.astype(np.int32), np.cumsum(counts) - counts

    def _local_pages(self, rank: int) -> _core.LocalPages:
        """Pages as large as the runs of keys allow, or several of these where they lie in a row."""
        return self.share(rank).local_pages()
