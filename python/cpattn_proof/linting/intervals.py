# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on ranges, and on tokens distributed over shards, for whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
MOST_MEMBERS = 2**24  # members of ranges; more would take minutes and gigabytes


class Absent(Exception):
    """The document lacks data that a check needs; the message names them."""


class Undecided(Absent):
    """The document has the data of a check, but too much, or data that it cannot judge."""


def ints(values: Sequence[Any] | Ints) -> Ints:
    """Return an array of 64-bit integers."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def offsets(counts: Ints) -> Ints:
    """Return the begin of each of several adjacent ranges, and the end of all."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def each(counts: Ints) -> tuple[Ints, Ints]:
    """Return the members of several ranges: index of the range, and index within it.

    `Undecided` if there are more than `MOST_MEMBERS`.

    >>> each(ints([2, 0, 1]))
    (array([0, 0, 2]), array([0, 1, 0]))
    """
    if (total := int(counts.sum())) > MOST_MEMBERS:
        raise Undecided(f"{total:,} tokens, pages or calls one by one, of {MOST_MEMBERS:,} at most")
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - offsets(counts)[owner]


def tally(
    begins: Ints, ends: Ints, expected: Sequence[tuple[int, int]] | Ints = ()
) -> tuple[Ints, Ints]:
    """Count the ranges that contain each number, as edges and the count from edge to edge.

    Ranges in `expected` are subtracted: the count is 0 if exactly these occur.

    >>> tally(ints([0, 2]), ints([3, 4]), [(0, 4)])
    (array([0, 2, 3, 4]), array([0, 1, 0, 0]))
    """
    wanted = ints(expected).reshape(-1, 2)
    at = np.concatenate([begins, ends, wanted[:, 0], wanted[:, 1]])
    sizes = (len(begins), len(ends), len(wanted), len(wanted))
    edges, places = np.unique(at, return_inverse=True)
    weights = np.repeat([1, -1, -1, 1], sizes)
    changes = np.bincount(places, weights=weights, minlength=len(edges)).astype(np.int64)
    return edges, np.cumsum(changes)


def first_of(flags: NDArray[Any]) -> int | None:
    """Return the index of the first set flag, or None."""
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None


def shard_length(tokens: Any, shard: Any, shards: int, interleave: int) -> Ints:
    """Count the tokens that one of `shards` keeps of the first `tokens` of a sequence.

    Shard ``t // interleave % shards`` keeps token t.

    >>> [int(shard_length(10, s, 2, 4)) for s in range(2)]
    [6, 4]
    """
    rounds, rest = np.divmod(np.asarray(tokens, np.int64), shards * interleave)
    return rounds * interleave + np.clip(rest - np.asarray(shard) * interleave, 0, interleave)


def shard_of(tokens: Any, shards: int, interleave: int) -> Ints:
    """Return the shard that keeps each token."""
    return np.asarray(tokens, np.int64) // interleave % shards


def shard_index(tokens: Any, shards: int, interleave: int) -> Ints:
    """Return the index of a token among the tokens of its shard."""
    tokens = np.asarray(tokens, np.int64)
    return tokens // (shards * interleave) * interleave + tokens % interleave
