# SPDX-License-Identifier: Apache-2.0
"""Placements of tokens on ranks, so that pools together hold more than one pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import _core
from .._arguments import at_least
from .._containers import torch_of
from .._types import Indices

Ints = NDArray[np.int64]


class Placement(Protocol):
    """Division of slots or positions over the ranks of a group.

    An index (of a slot, or of a position in a sequence) belongs to one rank, which stores it under
    a local index; rank and local index determine the index. No table is needed. Index -1 stands for
    no index; its rank and local index are -1. `PageInterleave` and `TokenInterleave` are
    placements; with one rank both change nothing. `ContextParallel` takes any object with
    `shard_size`, `owner_of` and `local_index`, and reads no other attribute.
    """

    @property
    def shard_size(self) -> int:
        """Number of ranks."""

    def owner_of(self, indices: Indices, /) -> Ints:
        """Return the rank that has each index."""

    def local_index(self, indices: Indices, /) -> Ints:
        """Return the local index of each index, on the rank that has it."""

    def filter_local(self, indices: Indices, rank: int, /) -> tuple[Ints, Ints]:
        """Return the places of a rank's indices in the list, and the local index of each."""

    def global_index(self, rank: int, local: Indices, /) -> Ints:
        """Return the index for each local index of a rank."""


@dataclass(frozen=True, kw_only=True)
class PageInterleave:
    """Placement of pools striped by pages: page l of the group lies on rank ``l % shard_size``.

    The rule is that of sglang 0.5.23. The ranks' pools together have ``shard_size`` times the slots
    of one. Slot x is on page ``l = x // page_size``, which is local page ``l // shard_size`` of its
    rank. Its local index, a row of that pool, is ``l // shard_size * page_size + x % page_size``.
    The first ``shard_size`` pages, local page 0 of each rank, receive padding. A value.

    Parameters
    ----------
    shard_size : int
        Ranks that share the pool, at most 2**15. With one rank, slots keep their numbers.
    page_size : int
        Tokens per page.

    Raises
    ------
    TypeError
        If sizes, slots or ranks are no integers.
    ValueError
        If sizes are out of bounds, slots are below -1, or ranks are outside ``[0, shard_size)``.

    Examples
    --------
    >>> placement = PageInterleave(shard_size=2, page_size=4)
    >>> placement.owner_of([8, 11, 12, -1])
    array([ 0,  0,  1, -1])
    >>> positions, rows = placement.filter_local([8, 9, 12, 13, 16], rank=0)
    >>> positions, rows
    (array([0, 1, 4]), array([4, 5, 8]))
    >>> placement.global_index(0, rows)
    array([ 8,  9, 16])
    """

    shard_size: int
    page_size: int
    _interleave: _core.Interleave = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self, "page_size")

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = {"shard_size": self.shard_size, "page_size": self.page_size}
        return partial(PageInterleave, **sizes), ()

    def owner_of(self, slots: Indices) -> Ints:
        """Return the rank that has each slot; -1 for -1."""
        return self._interleave.owners_of(slots, "PageInterleave.owner_of", "slots")

    def local_index(self, slots: Indices) -> Ints:
        """Return the row of each slot in its owner's pool; -1 for -1."""
        return self._interleave.local_indices(slots, "PageInterleave.local_index", "slots")

    def filter_local(self, slots: Indices, rank: int) -> tuple[Ints, Ints]:
        """Find the slots of a rank, to select its rows from rows for all slots.

        Returns
        -------
        positions : array [n], int64
            Positions of the rank's slots in `slots`, ascending.
        local_rows : array [n], int64
            Row of each slot in the rank's pool. Slot 0, which engines use as padding, is row 0 of
            rank 0.
        """
        return self._interleave.local_share(slots, rank, "PageInterleave.filter_local", "slots")

    def global_index(self, rank: int, local: Indices) -> Ints:
        """Return the slot of each row of a rank's pool; -1 for -1."""
        return self._interleave.global_indices(rank, local, "PageInterleave.global_index", "local")

    def num_local_slots(self, num_slots: int) -> int:
        """Return the rows that each rank needs for the first `num_slots` slots, in whole pages."""
        slots = at_least(0, num_slots, "PageInterleave.num_local_slots", "num_slots")
        return -(-slots // (self.shard_size * self.page_size)) * self.page_size


@dataclass(frozen=True, kw_only=True)
class TokenInterleave:
    """Placement of sequences in runs: rank ``p // interleave % shard_size`` keeps position p.

    The rule is that of decode context parallelism in vLLM. A rank stores its positions of a
    sequence without gaps: position p has the local index
    ``p // (interleave * shard_size) * interleave + p % interleave``. A value.

    Parameters
    ----------
    shard_size : int
        Ranks that share each sequence, at most 2**15. With one rank, it has every position.
    interleave : int
        Consecutive tokens of a rank before the next rank's turn.

    Raises
    ------
    TypeError
        If sizes, positions or ranks are no integers.
    ValueError
        If sizes are out of bounds, positions are below -1, lengths are below 0, or ranks are
        outside ``[0, shard_size)``.

    Examples
    --------
    >>> import numpy as np
    >>> placement = TokenInterleave(shard_size=2, interleave=1)
    >>> placement.owner_of([0, 1, 2, 3]), placement.local_index([0, 1, 2, 3])
    (array([0, 1, 0, 1]), array([0, 0, 1, 1]))
    >>> placement.local_lens([5, 2], rank=0), placement.local_lens([5, 2], rank=1)
    (array([3, 1]), array([2, 1]))
    >>> positions = np.array([[4, 5, 6], [0, 1, 2]])  # three new tokens of two sequences
    >>> placement.local_lens(positions + 1, rank=0)
    array([[3, 3, 4],
           [1, 1, 2]])
    """

    shard_size: int
    interleave: int
    _interleave: _core.Interleave = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self, "interleave")

    def __reduce__(self) -> tuple[Any, ...]:
        sizes = {"shard_size": self.shard_size, "interleave": self.interleave}
        return partial(TokenInterleave, **sizes), ()

    def owner_of(self, positions: Indices) -> Ints:
        """Return the rank that keeps each position; -1 for -1."""
        return self._interleave.owners_of(positions, "TokenInterleave.owner_of", "positions")

    def local_index(self, positions: Indices) -> Ints:
        """Return how many earlier positions the rank of each position keeps; -1 for -1."""
        return self._interleave.local_indices(positions, "TokenInterleave.local_index", "positions")

    def filter_local(self, positions: Indices, rank: int) -> tuple[Ints, Ints]:
        """Find the positions that a rank keeps.

        Returns
        -------
        kept : array [n], int64
            Places of the rank's positions in `positions`, ascending.
        local_positions : array [n], int64
            Local index of each kept position.
        """
        function = "TokenInterleave.filter_local"
        return self._interleave.local_share(positions, rank, function, "positions")

    def global_index(self, rank: int, local: Indices) -> Ints:
        """Return the position of each local index of a rank; -1 for -1."""
        return self._interleave.global_indices(rank, local, "TokenInterleave.global_index", "local")

    def local_lens(self, seq_lens: Indices, rank: int) -> Ints:
        """Return how many tokens a rank keeps of sequences of these lengths.

        With lengths of positions + 1, the result counts the rank's keys that tokens at these
        positions see under a causal mask. `seq_lens` may be a NumPy or torch array of two
        dimensions; the result has its shape.
        """
        function = "TokenInterleave.local_lens"
        is_array = isinstance(seq_lens, np.ndarray) or torch_of(seq_lens) is not None
        table: Any = seq_lens
        if not is_array or table.ndim != 2:
            return self._interleave.local_lens(seq_lens, rank, function, "seq_lens")
        lens = self._interleave.local_lens(table.reshape(-1), rank, function, "seq_lens")
        return lens.reshape(table.shape)


def _check(placement: PageInterleave | TokenInterleave, run_len: str) -> None:
    """Convert the sizes to plain ints within their bounds."""
    name = type(placement).__name__
    values = placement.shard_size, getattr(placement, run_len)
    interleave = _core.Interleave(*values, name, run_len)
    fields = {"shard_size": interleave.shard_size, run_len: interleave.run_len}
    for field_name, value in {**fields, "_interleave": interleave}.items():
        object.__setattr__(placement, field_name, value)  # set only here


PageInterleave.__module__ = TokenInterleave.__module__ = Placement.__module__ = "cpattn.kv"
