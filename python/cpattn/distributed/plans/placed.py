# SPDX-License-Identifier: Apache-2.0
"""Answers of a placement, which may be anybody's object: checked, and in runs of tokens."""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kv import PageInterleave, Placement, TokenInterleave

Array = NDArray[np.int64]


def located(placement: Placement, slots: Array) -> tuple[Array, Array]:
    """Return the owner and the row of each slot."""
    owner = _answer(placement, "owner_of", slots)
    row = _answer(placement, "local_index", slots)
    if ((owner < 0) | (owner >= placement.shard_size)).any():
        raise ValueError(
            f"ContextParallel: placement.owner_of must return ranks from 0 to "
            f"{placement.shard_size - 1}, got {owner.min()} to {owner.max()}"
        )
    if (row < 0).any():
        raise ValueError(
            f"ContextParallel: placement.local_index must return rows from 0 on, got {row.min()}"
        )
    return owner, row


def run_len(placement: Placement, pages: Array, page_size: int) -> int:
    """Return how many tokens of these pages always lie behind each other on one rank.

    The number divides `page_size`, and runs lie at multiples of it in the pool of their owner.
    Only the placements of this library are believed what their fields say: an attribute of another
    object may mean anything, and a subclass may deal tokens out differently.
    """
    if type(placement) is PageInterleave:
        return gcd(page_size, placement.page_size)
    if type(placement) is TokenInterleave:
        return gcd(page_size, placement.interleave)
    slots = np.unique(pages)[:, None] * page_size + np.arange(page_size)
    owner, row = located(placement, slots.ravel())
    return next(
        run
        for run in range(page_size, 0, -1)
        if page_size % run == 0 and _are_runs(owner.reshape(-1, run), row.reshape(-1, run))
    )


def has_telling_name(placement: Placement) -> bool:
    """Tell whether the repr of a placement says all about it, and the same on every rank."""
    return type(placement) in (PageInterleave, TokenInterleave)


def _are_runs(owner: Array, row: Array) -> bool:
    behind = row[:, :1] + np.arange(owner.shape[1])
    alone = owner == owner[:, :1]
    return bool(alone.all() and (row == behind).all() and not (row[:, 0] % owner.shape[1]).any())


def _answer(placement: Placement, method: str, slots: Array) -> Array:
    answer: Any = np.asarray(getattr(placement, method)(slots))
    if answer.shape != slots.shape or (answer.size and answer.dtype.kind not in "iu"):
        raise TypeError(
            f"ContextParallel: placement.{method} must return an integer for each slot, "
            f"{list(slots.shape)}, got {answer.dtype} {list(answer.shape)}"
        )
    return answer.astype(np.int64)
