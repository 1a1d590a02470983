# SPDX-License-Identifier: Apache-2.0
"""Keys of all ranks in one place: where a copy of the whole context is attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .key_shares import Array
from .partials import put_rows
from .sharded_plan import ShardedPlan


@dataclass(frozen=True)
class KeyScratch:
    """Which keys travel, and pages of scratch in which every request has its own in their order.

    Pages of positions that nobody sees stay zeros: those before a window, and of padding tokens.
    """

    block_tables: NDArray[np.int32]
    num_slots: int
    sent_rows: list[torch.Tensor]  # of each rank, in its pool
    slots: torch.Tensor  # where the rows of all ranks go, in rank order

    @property
    def counts(self) -> list[int]:
        """The rows that each rank sends."""
        return [len(rows) for rows in self.sent_rows]

    def filled(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows [sum(counts), heads, dim] of all ranks in their places."""
        scratch = [x.new_zeros(self.num_slots, *x.shape[1:]) for x in received]
        for whole, rows in zip(scratch, received, strict=True):
            put_rows(whole, self.slots, rows)
        return scratch


def key_scratch(plan: ShardedPlan, window: int | None) -> KeyScratch:
    """The scratch of a batch; the same for all layers of one window."""
    memo = plan.batch.memo
    if ("scratch", window) not in memo:
        memo["scratch", window] = _key_scratch(plan, window)
    scratch: KeyScratch = memo["scratch", window]
    return scratch


def _key_scratch(plan: ShardedPlan, window: int | None) -> KeyScratch:
    shares, rows = plan.batch.shares, plan.batch.rows
    first_needed = np.zeros_like(shares.kv_lens)
    if window is not None:
        first_needed = shares.kv_lens.copy()
        np.minimum.at(first_needed, rows.request, np.maximum(rows.position - window, 0))
    num_pages = np.count_nonzero(plan.block_tables >= 0, axis=1)
    tables = np.full(plan.block_tables.shape, -1, dtype=np.int32)
    tables[plan.block_tables >= 0] = np.arange(num_pages.sum())
    first_slot: Array = (np.cumsum(num_pages) - num_pages) * plan.page_size
    sent, slots = [], []
    for rank in range(plan.placement.shard_size):
        keys = shares.local_keys(rank)
        needed = keys.position >= first_needed[keys.request]
        sent.append(torch.from_numpy(keys.row[needed]))
        slots.append((first_slot[keys.request] + keys.position)[needed])
    return KeyScratch(
        block_tables=tables,
        num_slots=int(num_pages.sum()) * plan.page_size,
        sent_rows=sent,
        slots=torch.from_numpy(np.concatenate(slots)),
    )
