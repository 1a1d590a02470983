# SPDX-License-Identifier: Apache-2.0
"""Answers of a placement, which may be anybody's object: checked here."""

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
    """Return where keys are; with the owner and the row of each slot of pages, if it was asked for.

    Only the placements of this library are believed what their fields say: an attribute of another
    object may mean anything, and a subclass may deal tokens out differently.
    """
    if has_telling_name(placement):
        return _core.BatchKeys(pages, placement._interleave), None  # type: ignore[attr-defined]
    ids = np.unique(pages.ids).astype(np.int64)
    slots = ids[:, None] * pages.page_size + np.arange(pages.page_size)
    owner, row = located(placement, slots.ravel())
    return _core.BatchKeys(pages, placement.shard_size, ids, owner, row), (owner, row)


def has_telling_name(placement: Placement) -> bool:
    """Tell whether the repr of a placement says all about it, and the same on every rank."""
    return type(placement) in (PageInterleave, TokenInterleave)


def _answer(placement: Placement, method: str, slots: Array) -> Array:
    answer: Any = np.asarray(getattr(placement, method)(slots))
    if answer.shape != slots.shape or (answer.size and answer.dtype.kind not in "iu"):
        raise TypeError(
            f"ContextParallel: placement.{method} must return an integer for each slot, "
            f"{list(slots.shape)}, got {answer.dtype} {list(answer.shape)}"
        )
    return answer.astype(np.int64)
