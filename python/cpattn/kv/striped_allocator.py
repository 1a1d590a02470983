# SPDX-License-Identifier: Apache-2.0
"""Free pages of a pool that is striped over a group of ranks, the same on every rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._types import Indices

__all__ = ["StripedAllocator"]


class StripedAllocator:
    """Allocates the pages of a pool that is striped by pages, as sglang 0.5.23 does.

    Slots are those of the whole group, as in `PageInterleave`. Every rank has an allocator of its
    own and makes the same calls, so that all are in the same state without a word between them.

    The pages of rank r are *class* r: logical pages ``q * shard_size + r`` for
    ``q = 1, ..., size // page_size``. The pages of a sequence lie on the ranks in turn: its page P
    is of class ``(b + P) % shard_size``, where b is its *rotation base*. So no rank has more than
    one page more of it than any other.

    Pages are taken from the front of the list of free pages of their class, which is ascending at
    first. Freed pages go to the front, in ascending order. With `need_sort` they wait in a second
    list until a call needs more pages of some class than its first list has; then every class has
    one ascending list again.

    Parameters
    ----------
    size : int
        Slots of each rank, without those of its reserved page 0.
    page_size : int
        Tokens of a page.
    shard_size : int
        Ranks that share the pool, at least 2.
    need_sort : bool
        Whether freed pages wait. sglang has it so where it sends KV to other servers.

    Raises
    ------
    TypeError
        For sizes, lengths, bases or slots that are no integers, and bases in anything but a list.
    ValueError
        For sizes out of bounds and all that the methods refuse. Nothing has changed then.

    Examples
    --------
    >>> allocator = StripedAllocator(16, page_size=4, shard_size=2)
    >>> bases = [None]
    >>> slots = allocator.alloc_extend([0], [10], bases)    # pages 2, 3 and 4
    >>> slots, bases
    (array([ 8,  9, 10, 11, 12, 13, 14, 15, 16, 17]), [0])
    >>> allocator.class_free_page_counts(), allocator.available_size()
    ([2, 3], 16)
    >>> allocator.free(slots)
    >>> allocator.available_size()
    32
    """

    def __init__(
        self, size: int, *, page_size: int, shard_size: int, need_sort: bool = False
    ) -> None:
        self._allocator = _core.StripedAllocator(size, page_size, shard_size, need_sort)

    @property
    def size(self) -> int:
        """Slots of each rank, without those of its reserved page."""
        return self._allocator.size

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._allocator.page_size

    @property
    def shard_size(self) -> int:
        """Ranks that share the pool."""
        return self._allocator.shard_size

    @property
    def need_sort(self) -> bool:
        """Whether freed pages wait in a second list."""
        return self._allocator.need_sort

    def __repr__(self) -> str:
        return (
            f"StripedAllocator({self.size}, page_size={self.page_size}, "
            f"shard_size={self.shard_size}, need_sort={self.need_sort})"
        )

    def alloc_extend(
        self, prefix_lens: Indices, seq_lens: Indices, rotation_bases: list[int | None]
    ) -> NDArray[np.int64] | None:
        """Allocate the slots of the new tokens of a batch, all or none.

        Parameters
        ----------
        prefix_lens : ints [bs]
            Tokens that each request has already: multiples of the page size.
        seq_lens : ints [bs]
            Tokens of each request with its new ones, at least one. These begin a page.
        rotation_bases : list of int or None [bs]
            Base of each request's sequence, any integer, or None for a new sequence. Each
            None is replaced by the class with the most free pages, the lowest of several, as the
            requests before it leave them; also where the call returns None.

        Returns
        -------
        array, int64, or None
            The slots of all new tokens by request and position. What a request does not need of its
            last page stays unused. None if the pages of some class do not suffice; the free pages
            are then as before.
        """
        return self._allocator.alloc_extend(prefix_lens, seq_lens, rotation_bases)

    def alloc_cyclic(self, start_class: int, num_slots: int) -> NDArray[np.int64] | None:
        """Allocate `num_slots` slots on whole pages, whose classes follow from `start_class` on.

        As `alloc_extend` of one request without a prefix whose base is `start_class`, any integer.
        """
        return self._allocator.alloc_cyclic(start_class, num_slots)

    def free(self, slots: Indices) -> None:
        """Free the pages of these slots, each whole: one slot of a page is enough.

        What is free already, reserved (the first ``shard_size`` pages) or outside the pool is a
        ValueError, and nothing is freed.
        """
        self._allocator.free(slots)

    def class_free_page_counts(self) -> list[int]:
        """Return the free pages of each class."""
        return self._allocator.class_free_page_counts()

    def least_full_class(self) -> int:
        """Return the class with the most free pages, the lowest of several: a new sequence's."""
        return self._allocator.least_full_class()

    def available_size(self) -> int:
        """Return the slots that one sequence is sure to get, whatever its base.

        That is ``shard_size * page_size`` times the pages of the class with the fewest free ones.
        """
        return self._allocator.available_size()

    def aggregate_free_size(self) -> int:
        """Return the slots of all free pages."""
        return self._allocator.aggregate_free_size()


StripedAllocator.__module__ = "cpattn.kv"
