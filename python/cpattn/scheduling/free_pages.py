# SPDX-License-Identifier: Apache-2.0
"""Pages that nobody has: of a pool, or of one that ranks share by pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from ..kv.striped_allocator import StripedAllocator

Pages = tuple[int, ...]
Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]  # of each rank


class FreePages(Protocol):
    """Pages for chains: of a chain its page `first` and the ones behind it are asked for.

    `root` is the first page of the chain, None if that is among those asked for.
    """

    def num_free(self) -> int:
        """Pages that can be taken, whichever they are."""

    def fits(self, first: int, count: int, root: int | None, idle: Iterable[Pages]) -> bool:
        """Whether `take` would find `count` pages, as `idle` ones are given back one by one."""

    def take(self, first: int, count: int, root: int | None) -> Pages | None:
        """Pages `first`, `first` + 1, ... of a chain, all or none."""

    def give_back(self, pages: Pages) -> None:
        """Have these pages taken again, the first one first."""


class WholePool:
    """Pages 1 ... `num_pages`: the last one that came back first, then those never taken."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._used = 0  # pages 1 ... so many have been handed out
        self._free: list[int] = []  # those of them that are back

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
    """Pages of `shard_size` ranks, each of which has as many: see `StripedAllocator`.

    The pages of a chain lie on the ranks in turn, so that a chain fits where each rank has enough
    of them, not where all ranks together have.
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
        # A new chain begins where most is free: it may fit before all is given back, not after.
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
        base = int(free.argmax()) if root is None else root  # of equal ones the lowest
        return bool((self._by_owner(base + first + np.arange(count)) <= free).all())

    def _by_owner(self, pages: np.ndarray[Any, np.dtype[np.int64]]) -> Counts:
        """Count the pages of each rank."""
        return np.bincount(pages % self._shard_size, minlength=self._shard_size)
