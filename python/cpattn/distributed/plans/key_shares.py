# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which keys of a batch, where KV pools are sharded."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...kv import Placement
from .placed import located, run_len

Array = NDArray[np.int64]

_LARGEST_PAGE = 64  # rows; kernels gain nothing from larger ones


class LocalKeys(NamedTuple):
    """The keys that one rank holds, request after request, in ascending positions."""

    request: Array
    position: Array
    row: Array  # of the pool of the rank


class LocalPages(NamedTuple):
    """The same as pages, which attention reads: those of each request from ``indptr`` on."""

    page_size: int
    indptr: Array
    ids: Array


class KeyShares:
    """The keys of all requests in runs: positions that follow each other on one rank.

    Runs are of `run` tokens, of which the last of a request may be cut, and lie behind each other
    in the pool of their owner. So what a row sees of a rank's keys is a prefix of their list, and
    counting them takes no search.
    """

    def __init__(
        self, placement: Placement, block_tables: NDArray[np.int32], kv_lens: Array, page_size: int
    ) -> None:
        used = block_tables[np.arange(block_tables.shape[1]) < -(-kv_lens[:, None] // page_size)]
        self.run = run_len(placement, used.astype(np.int64), page_size)
        self._page_size = page_size
        self.kv_lens = kv_lens
        num_runs = -(-kv_lens // self.run)
        self.indptr = np.append(0, np.cumsum(num_runs))
        self.request = np.repeat(np.arange(len(kv_lens)), num_runs)
        self.begin = (np.arange(self.indptr[-1]) - self.indptr[self.request]) * self.run
        pages = block_tables[self.request, self.begin // page_size].astype(np.int64)
        slots = pages * page_size + self.begin % page_size
        self.owner, self.row = located(placement, slots)
        self._remember()

    def _remember(self) -> None:
        self._runs_before = cache(self._count_runs)
        self.local_keys = cache(self._local_keys)
        self.local_pages = cache(self._local_pages)

    def of_groups(self, group_of: Array) -> KeyShares:
        """The same of groups of ranks. Their keys are in no pool: `row` and pages say nothing."""
        shares = copy(self)
        shares.owner = group_of[self.owner]
        shares._remember()
        return shares

    def count_below(self, rank: int, request: Array, position: Array) -> Array:
        """How many keys before a position of its request the rank holds, for each pair.

        Positions are at most the length of the request.
        """
        run = self.indptr[request] + position // self.run
        before = self._runs_before(rank)
        whole = (before[run] - before[self.indptr[request]]) * self.run
        inside = position % self.run  # 0 at the end of the last run, which is not looked up
        cut = inside > 0
        whole[cut] += inside[cut] * (self.owner[run[cut]] == rank)
        return whole

    def counts(self, rank: int) -> Array:
        """The keys of each request that the rank holds."""
        return self.count_below(rank, np.arange(len(self.kv_lens)), self.kv_lens)

    def _count_runs(self, rank: int) -> Array:
        return np.append(0, np.cumsum(self.owner == rank))

    def _local_keys(self, rank: int) -> LocalKeys:
        runs = np.flatnonzero(self.owner == rank)
        lens = np.minimum(self.run, self.kv_lens[self.request[runs]] - self.begin[runs])
        which = np.repeat(runs, lens)
        within = np.arange(len(which)) - np.repeat(np.cumsum(lens) - lens, lens)
        return LocalKeys(self.request[which], self.begin[which] + within, self.row[which] + within)

    def _local_pages(self, rank: int) -> LocalPages:
        """In pages as large as the runs allow, or several of these where they lie in a row."""
        runs = np.flatnonzero(self.owner == rank)
        rows = self.row[runs]
        before = self._runs_before(rank)[self.indptr]
        index = np.arange(len(runs)) - before[self.request[runs]]  # within its request
        joined = 1
        while (larger := self.run * joined * 2) <= _LARGEST_PAGE and not self._page_size % larger:
            first = np.arange(len(runs)) - index % (joined * 2)
            together = rows == rows[first] + index % (joined * 2) * self.run
            if not together.all() or (rows[first] % larger).any():
                break
            joined *= 2
        page = self.run * joined
        counts = -(-np.diff(before) // joined)
        return LocalPages(page, np.append(0, np.cumsum(counts)), rows[index % joined == 0] // page)
