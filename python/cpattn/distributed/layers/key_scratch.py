# SPDX-License-Identifier: Apache-2.0
"""Keys of all ranks in one place: where a copy of the whole context is attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..plans.key_shares import Array
from ..plans.sharded_plan import ShardedPlan
from .rows import put_rows, take_rows


class Part(NamedTuple):
    """Part of the keys that travels."""

    cached: bool  # those of prefixes, from the pools
    new_in_pools: bool
    new_rows: bool  # new keys that are in no pool yet


WHOLE = Part(cached=True, new_in_pools=True, new_rows=False)
CACHED = Part(cached=True, new_in_pools=False, new_rows=False)


@dataclass(frozen=True)
class KeyScratch:
    """Selection of the keys that travel, and pages of scratch that hold each request's in order.

    Pages of positions that nobody sees stay zeros: those before a window, and of padding tokens.
    Of the keys a `Part` travels: new ones come from the pools, or as rows of the ranks that
    computed them, behind each rank's others.
    """

    block_tables: NDArray[np.int32]
    num_slots: int
    sent_rows: list[torch.Tensor]  # of each rank, in its pool
    num_new: list[int]  # rows that each rank sends besides, which are in no pool yet
    slots: torch.Tensor  # where the rows of all ranks go, in rank order
    sources: torch.Tensor | None  # which of these they are; None: all
    new_rows: torch.Tensor  # where, among the rows of all ranks, those are that are in no pool

    @property
    def counts(self) -> list[int]:
        """The rows that each rank sends."""
        return [len(rows) + new for rows, new in zip(self.sent_rows, self.num_new, strict=True)]

    @cached_property
    def slots_by_rank(self) -> list[torch.Tensor]:
        """Slot of each row of each rank, -1 for none."""
        every = torch.full((sum(self.counts),), -1)
        every[slice(None) if self.sources is None else self.sources] = self.slots
        return list(every.split(self.counts))

    @cached_property
    def new_slots(self) -> torch.Tensor:
        """Slots of the rows that are in no pool, of all ranks; -1 for padding tokens."""
        return torch.cat(self.slots_by_rank)[self.new_rows]

    @cached_property
    def unfilled(self) -> torch.Tensor:
        """Slots to which no row goes."""
        free = torch.ones(self.num_slots, dtype=torch.bool)
        free[self.slots] = False
        return torch.nonzero(free).view(-1)

    def filled(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows [sum(counts), heads, dim] of all ranks in their places."""
        scratch = [x.new_zeros(self.num_slots, *x.shape[1:]) for x in received]
        self.fill(scratch, received)
        return scratch

    def fill(self, scratch: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Put rows into their places in scratch that has others already."""
        for whole, rows in zip(scratch, received, strict=True):
            put_rows(
                whole, self.slots, rows if self.sources is None else take_rows(rows, self.sources)
            )


def key_scratch(plan: ShardedPlan, window: int | None, part: Part = WHOLE) -> KeyScratch:
    """The scratch of a batch; the same for all layers of one window.

    Pages and their places are those of the whole context, whatever part of it travels.
    """
    memo = plan.batch.memo
    key = ("scratch", window, part)
    if key not in memo:
        memo[key] = _key_scratch(plan, window, part)
    scratch: KeyScratch = memo[key]
    return scratch


def _key_scratch(plan: ShardedPlan, window: int | None, part: Part) -> KeyScratch:
    shares, rows = plan.batch.shares, plan.batch.rows
    first_seen = plan.batch.first_seen(window)
    num_pages = np.count_nonzero(plan.block_tables >= 0, axis=1)
    tables = np.full(plan.block_tables.shape, -1, dtype=np.int32)
    tables[plan.block_tables >= 0] = np.arange(num_pages.sum())
    first_slot: Array = (np.cumsum(num_pages) - num_pages) * plan.page_size
    sent, slots, num_new = [], [], []
    begin = 0  # of the rank's new tokens among those of all ranks
    prefixes = np.asarray(plan.metadata.prefix_lens)
    for rank in range(plan.placement.shard_size):
        keys = shares.local_keys(rank)
        needed = keys.position >= first_seen[keys.request]
        is_cached = keys.position < prefixes[keys.request]
        needed &= (part.cached & is_cached) | (part.new_in_pools & ~is_cached)
        sent.append(torch.from_numpy(keys.row[needed]))
        slots.append((first_slot[keys.request] + keys.position)[needed])
        num_new.append(plan.rows_per_rank[rank] if part.new_rows else 0)
        request, position = (
            x[begin : begin + num_new[rank]] for x in (rows.request, rows.position)
        )
        padding = position >= shares.kv_lens[request]
        slots.append(np.where(padding, -1, first_slot[request] + position))
        begin += num_new[rank]
    every_slot = np.concatenate(slots)
    placed = every_slot >= 0
    is_new = np.repeat(np.tile([False, True], len(sent)), [len(part) for part in slots])
    return KeyScratch(
        block_tables=tables,
        num_slots=int(num_pages.sum()) * plan.page_size,
        sent_rows=sent,
        num_new=num_new,
        slots=torch.from_numpy(every_slot[placed]),
        sources=None if placed.all() else torch.from_numpy(np.flatnonzero(placed)),
        new_rows=torch.from_numpy(np.flatnonzero(is_new)),
    )
