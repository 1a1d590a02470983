# SPDX-License-Identifier: Apache-2.0
"""Free pages of a pool that is striped over a group of ranks, the same on every rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._types import Indices


class StripedAllocator(_core.StripedAllocator):
    """Allocator of pages of a pool that is striped by pages, with the rules of sglang 0.5.23.

    Slots count in the whole group, as in `PageInterleave`. Every rank has its own allocator and
    makes the same calls, so all allocators have the same state without communication.

    The pages of rank r are *class* r: logical pages ``q * shard_size + r`` for
    ``q = 1, ..., size // page_size``. The pages of a sequence lie on the ranks in turn: page P has
    class ``(b + P) % shard_size``, where b is its *rotation base*. Ranks therefore differ by at
    most one page of a sequence.

    Each class has a list of free pages, ascending at first; pages are taken from its front. Freed
    pages go to the front, in ascending order. With `need_sort` they wait in a second list until a
    call needs more pages of some class than its first list has; each class then merges both into
    one ascending list.

    Parameters
    ----------
    size : int
        Slots of each rank, without its reserved page 0.
    page_size : int
        Tokens per page.
    shard_size : int
        Ranks that share the pool, at least 2.
    need_sort : bool
        Whether freed pages wait, as in sglang servers that send KV to other servers.

    Attributes
    ----------
    size, page_size, shard_size, need_sort
        As given.

    Raises
    ------
    TypeError
        If sizes, lengths, bases or slots are no integers, or bases are not in a list.
    ValueError
        If sizes are out of bounds, or a method refuses its arguments. Nothing has changed then.

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
        super().__init__(size, page_size, shard_size, need_sort)

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
            Cached tokens of each request: multiples of the page size.
        seq_lens : ints [bs]
            Tokens of each request including its new ones, at least one. The new tokens begin a
            page.
        rotation_bases : list of int or None [bs]
            Base of each request's sequence, any integer, or None for a new sequence. The call
            replaces None by the class with the most free pages (the lowest on a tie) after the
            requests before it, even if the call returns None.

        Returns
        -------
        array, int64, or None
            Slots of all new tokens by request and position. The rest of a request's last page stays
            unused. None if pages of some class do not suffice; the free pages are then unchanged.
        """
        return super().alloc_extend(prefix_lens, seq_lens, rotation_bases)

    def alloc_cyclic(self, start_class: int, num_slots: int) -> NDArray[np.int64] | None:
        """Allocate `num_slots` slots on whole pages, whose classes follow from `start_class` on.

        Equals `alloc_extend` for one request without prefix and base `start_class` (any integer).
        """
        return super().alloc_cyclic(start_class, num_slots)

    def free(self, slots: Indices) -> None:
        """Free the pages of these slots, each whole: one slot of a page is enough.

        A slot that is free already, reserved (the first ``shard_size`` pages) or outside the pool
        raises ValueError, and nothing is freed.
        """
        super().free(slots)

    def class_free_page_counts(self) -> list[int]:
        """Return the number of free pages of each class."""
        return super().class_free_page_counts()

    def least_full_class(self) -> int:
        """Return the class with the most free pages, the lowest on a tie, for new sequences."""
        return super().least_full_class()

    def available_size(self) -> int:
        """Return the slots that one sequence can certainly get, for any base.

        The result is ``shard_size * page_size`` times the smallest number of free pages of a class.
        """
        return super().available_size()

    def aggregate_free_size(self) -> int:
        """Return the number of slots in all free pages."""
        return super().aggregate_free_size()


StripedAllocator.__module__ = "cpattn.kv"
