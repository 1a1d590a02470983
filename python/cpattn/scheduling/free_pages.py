# SPDX-License-Identifier: Apache-2.0
"""Free pages of a pool, or of a pool that ranks share by pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ..kv.striped_allocator import StripedAllocator

Pages = tuple[int, ...]
Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # of each rank


class FreePages(Protocol):
    """Free pages for chains; a request takes pages of a chain from page number `first` on.

    `root` is the first page of the chain, or None if the request includes it.
    """

    def num_free(self) -> int:
        """Number of pages that can be taken."""

    def fits(self, first: int, count: int, root: int | None, idle: Iterable[Pages]) -> bool:
        """Whether `take` would find `count` pages while `idle` ones are given back one by one."""

    def take(self, first: int, count: int, root: int | None) -> Pages | None:
        """Take pages `first`, `first` + 1, ... of a chain, all or none."""

    def give_back(self, pages: Pages) -> None:
        """Give pages back; the first one is taken again first."""


class WholePool:
    """Pages 1 ... `num_pages`: returned pages first, latest first, then pages never taken."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._used = 0  # number of pages taken at least once
        self._free: list[int] = []  # those of them that came back

    def num_free(self) -> int:
        return self._num_pages - self._used + len(self._free)

    def fits(self, first: int, count: int, root: int | None, idle: Iterable[Pages]) -> bool:
        return count <= self.num_free() or count <= self.num_free() + sum(map(len, idle))

    def take(self, first: int, count: int, root: int | None) -> Pages | None:
        if count > self.num_free():
            return None
        return tuple(self._take_page() for _ in range(count))

    def give_back(self, pages: Pages) -> None:
        self._free.extend(reversed(pages))

    def _take_page(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used


class StripedPool:
    """Pages of `shard_size` ranks with equally many pages each: see `StripedAllocator`.

    The pages of a chain lie on the ranks in turn, so a chain needs enough free pages on each rank,
    not only in total.
    """

    def __init__(self, num_pages: int, page_size: int, shard_size: int) -> None:
        size = num_pages // shard_size * page_size
        self._shard_size, self._page_size = shard_size, page_size
        self._allocator = StripedAllocator(size, page_size=page_size, shard_size=shard_size)

    def num_free(self) -> int:
        return sum(self._allocator.class_free_page_counts())

    def fits(self, first: int, count: int, root: int | None, idle: Iterable[Pages]) -> bool:
        free = np.array(self._allocator.class_free_page_counts())
        if self._suffices(free, first, count, root):
            return True
        given = [self._by_owner(np.array(pages, np.int64)) for pages in idle]
        if self._suffices(sum(given, start=free), first, count, root):
            return True
        if root is not None or free.sum() + sum(x.sum() for x in given) < count:
            return False
        # A new chain begins at the rank with the most free pages: it may fit before all come back.
        for pages in given:
            free = free + pages
            if self._suffices(free, first, count, root):
                return True
        return False

    def take(self, first: int, count: int, root: int | None) -> Pages | None:
        if not count:
            return ()
        bases = [None if root is None else root % self._shard_size]
        ends = first * self._page_size, (first + count) * self._page_size
        slots = self._allocator.alloc_extend([ends[0]], [ends[1]], bases)
        if slots is None:
            return None
        return tuple((slots[:: self._page_size] // self._page_size).tolist())

    def give_back(self, pages: Pages) -> None:
        self._allocator.free(np.array(pages, np.int64) * self._page_size)

    def _suffices(self, free: Counts, first: int, count: int, root: int | None) -> bool:
        """Whether each rank has the pages that a chain takes from it."""
        base = int(free.argmax()) if root is None else root  # the lowest on a tie
        return bool((self._by_owner(base + first + np.arange(count)) <= free).all())

    def _by_owner(self, pages: np.ndarray[Any, np.dtype[np.int64]]) -> Counts:
        """Return the number of pages of each rank."""
        return np.bincount(pages % self._shard_size, minlength=self._shard_size)
