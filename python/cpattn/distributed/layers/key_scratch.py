# SPDX-License-Identifier: Apache-2.0
"""Keys of all ranks in one place: scratch with a copy of the whole context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..plans.sharded_plan import ShardedPlan
from .rows import put_rows


class Part(NamedTuple):
    """Part of the keys that travels."""

    cached: bool  # keys of prefixes, from the pools
    new_in_pools: bool
    new_rows: bool  # new keys that are in no pool yet


WHOLE = Part(cached=True, new_in_pools=True, new_rows=False)
CACHED = Part(cached=True, new_in_pools=False, new_rows=False)


@dataclass(frozen=True)
class KeyScratch:
    """Selection of traveling keys, and pages of scratch that hold each request's keys in order.

    Pages of invisible positions stay zeros: before a window, and of padding tokens. Of the keys, a
    `Part` travels: new keys come from the pools, or as rows of the ranks that computed them, after
    each rank's other rows.
    """

    block_tables: NDArray[np.int32]
    num_slots: int
    sent_rows: list[torch.Tensor]  # of each rank, in its pool
    num_new: list[int]  # rows in no pool yet that each rank also sends
    every_slot: torch.Tensor  # for the rows of all ranks, in rank order; -1 for padding tokens
    new_rows: torch.Tensor  # places of rows in no pool yet among the rows of all ranks

    @cached_property
    def counts(self) -> list[int]:
        """Number of rows that each rank sends."""
        return [len(rows) + new for rows, new in zip(self.sent_rows, self.num_new, strict=True)]

    @cached_property
    def slots_by_rank(self) -> tuple[torch.Tensor, ...]:
        """Slot of each row of each rank, -1 for none."""
        return self.every_slot.split(self.counts)

    @cached_property
    def new_slots(self) -> torch.Tensor:
        """Slots of the rows in no pool yet, of all ranks; -1 for padding tokens."""
        return self.every_slot[self.new_rows]

    @cached_property
    def unfilled(self) -> torch.Tensor:
        """Slots that receive no row."""
        free = torch.ones(self.num_slots, dtype=torch.bool, device="cpu")
        free[self.every_slot[self.every_slot >= 0]] = False
        return torch.nonzero(free).view(-1)

    def filled(self, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return rows [sum(counts), heads, dim] of all ranks in their places."""
        scratch = [x.new_zeros(self.num_slots, *x.shape[1:]) for x in received]
        self.fill(scratch, received)
        return scratch

    def fill(self, scratch: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Put rows into their places in scratch that already has other rows."""
        put_rows(scratch, self.every_slot, received)


def key_scratch(plan: ShardedPlan, window: int | None, part: Part = WHOLE) -> KeyScratch:
    """Return the scratch layout of a batch, shared by all layers with the same window.

    Pages and places cover the whole context, for any part of it that travels.
    """
    batch = plan.batch

    def make() -> KeyScratch:
        tables, num_slots, sent, slots, new_rows = batch.shares.keys.scratch(
            batch.tokens.padded_counts, batch.rows, plan.rows_per_rank, part, window
        )
        num_new = [rows if part.new_rows else 0 for rows in plan.rows_per_rank]
        of_ranks = [torch.from_numpy(rows) for rows in sent]
        places = torch.from_numpy(slots), torch.from_numpy(new_rows)
        return KeyScratch(tables, num_slots, of_ranks, num_new, *places)

    return batch.once(("scratch", window, part), make)
