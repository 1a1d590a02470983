# SPDX-License-Identifier: Apache-2.0
"""Checked answers of a placement, which may be an object of the user."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import _core
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


def batch_keys(
    placement: Placement, pages: _core.BatchPages
) -> tuple[_core.BatchKeys, tuple[Array, Array] | None]:
    """Return the places of keys, and the owner and row of each slot if the placement was asked.

    Only placements of this library are known by their fields: an attribute of another object may
    mean anything, and a subclass may distribute tokens differently.
    """
    if has_telling_name(placement):
        return _core.BatchKeys(pages, placement._interleave), None  # type: ignore[attr-defined]
    ids = np.unique(pages.ids).astype(np.int64)
    slots = ids[:, None] * pages.page_size + np.arange(pages.page_size)
    owner, row = located(placement, slots.ravel())
    return _core.BatchKeys(pages, placement.shard_size, ids, owner, row), (owner, row)


def has_telling_name(placement: Placement) -> bool:
    """Tell whether the repr of a placement identifies it, equally on every rank."""
    return type(placement) in (PageInterleave, TokenInterleave)


def _answer(placement: Placement, method: str, slots: Array) -> Array:
    answer: Any = np.asarray(getattr(placement, method)(slots))
    if answer.shape != slots.shape or (answer.size and answer.dtype.kind not in "iu"):
        raise TypeError(
            f"ContextParallel: placement.{method} must return an integer for each slot, "
            f"{list(slots.shape)}, got {answer.dtype} {list(answer.shape)}"
        )
    return answer.astype(np.int64)
