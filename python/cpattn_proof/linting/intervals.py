# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of ranges and of tokens shared out to shards, on whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
MOST_MEMBERS = 2**24  # of ranges, one by one; more would take minutes and gigabytes


class Absent(Exception):
    """The document does not say what a check needs; the message names it."""


class Undecided(Absent):
    """The document says what a check needs, and too much of it, or what it cannot judge."""


def ints(values: Sequence[Any] | Ints) -> Ints:
    """An array of 64-bit integers."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


def offsets(counts: Ints) -> Ints:
    """Return where each of several ranges that follow each other begins, and where all end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def each(counts: Ints) -> tuple[Ints, Ints]:
    """The members of several ranges: of which range each is, and the how-manieth in it.

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
    """Count the ranges that each number is in, as edges and the count from each edge to the next.

    Ranges in `expected` are subtracted: where exactly these were wanted the count is 0.

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
    """Return the place of the first flag that is set, if any is."""
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None


def shard_length(tokens: Any, shard: Any, shards: int, interleave: int) -> Ints:
    """Count the tokens that one of `shards` keeps of the first `tokens` of a sequence.

    Token t is kept by shard ``t // interleave % shards``.

    >>> [int(shard_length(10, s, 2, 4)) for s in range(2)]
    [6, 4]
    """
    rounds, rest = np.divmod(np.asarray(tokens, np.int64), shards * interleave)
    return rounds * interleave + np.clip(rest - np.asarray(shard) * interleave, 0, interleave)


def shard_of(tokens: Any, shards: int, interleave: int) -> Ints:
    """Return the shard that keeps each token."""
    return np.asarray(tokens, np.int64) // interleave % shards


def shard_index(tokens: Any, shards: int, interleave: int) -> Ints:
    """The place of a token among those of its shard."""
    tokens = np.asarray(tokens, np.int64)
    return tokens // (shards * interleave) * interleave + tokens % interleave
