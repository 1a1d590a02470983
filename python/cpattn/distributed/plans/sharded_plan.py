# SPDX-License-Identifier: Apache-2.0
"""Plans of batches with sharded keys: owners of keys, and keys of each rank that rows see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ...kv import Placement
from ..transport.exchange import RowExchange
from ..transport.terms import digest
from .key_shares import Array, KeyShares
from .mesh import Mesh
from .placed import has_telling_name, located
from .plan import ContextParallelPlan, planned_pages
from .sequence_call import Positions, RowMask, SequenceCall, Sides, Visibility, sequence_call
from .tokens import NewTokens, Rows, index_array

Made = TypeVar("Made")


@dataclass(frozen=True)
class ShardedBatch:
    """Queries of a batch, and the ranks that hold its keys and its new tokens."""

    shares: KeyShares
    placement: Placement
    tokens: NewTokens
    mask: RowMask | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # values that layers share

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return a value that layers share, made at the first request."""
        if key not in self.memo:
            self.memo[key] = make()
        made: Made = self.memo[key]
        return made

    @property
    def rows(self) -> Rows:
        """Request and position of all queries; in a prefill, rank after rank."""
        return self.tokens.rows

    @cached_property
    def located(self) -> tuple[Array, Array]:
        """Owner of each row's slot, and its row in the owner's pool; -1 if none is written."""
        slots = self.tokens.row_slots
        written = slots >= 0
        owner, local = np.full((2, len(slots)), -1, dtype=np.int64)
        owner[written], local[written] = located(self.placement, slots[written])
        return owner, local

    @property
    def owner(self) -> Array:
        """Owner of each new token's slot, -1 if none is written; in the order of `rows`."""
        return self.located[0]

    @property
    def local_slots(self) -> Array:
        """Row of each new token in its owner's pool."""
        return self.located[1]

    @property
    def visible_keys(self) -> Array:
        """Number of keys that each query sees if it sees all keys up to its own."""
        return np.minimum(self.rows.position + 1, self.shares.kv_lens[self.rows.request])

    def slots_of(self, rank: int) -> Array:
        """Return the row of each new token in a rank's pool, -1 for tokens of other ranks."""
        return np.where(self.owner == rank, self.local_slots, -1)

    def check_pool(self, call: str, rank: int, num_slots: int) -> None:
        """Refuse a pool that lacks rows for keys of the rank."""
        pages = self.shares.local_pages(rank)
        if len(pages.ids) and (pages.ids.max() + 1) * pages.page_size > num_slots:
            raise ValueError(
                f"ContextParallel.{call}: the shard of rank {rank} must have the "
                f"{(pages.ids.max() + 1) * pages.page_size} rows that the block tables need, got "
                f"{num_slots}"
            )

    def call(self, rank: int, rows: slice, *, causal: bool, window: Sides) -> SequenceCall | None:
        """Return the call with which rows see the keys in a rank's pool; None if they see none.

        All layers with this visibility share it.
        """
        return self.once(
            (rank, rows.start, rows.stop, causal, window),
            lambda: sequence_call(
                self.shares,
                rank,
                self.shares.local_pages(rank),
                self.tokens.rows_in(rows),
                Visibility(causal, window, self.mask),
            ),
        )

    def positions(self, rank: int, rows: slice) -> Positions:
        """Return the positions of some rows, and of the keys of a rank."""
        tokens = self.tokens.rows_in(rows).position.astype(np.int32)
        return Positions(tokens, *self.shares.positions(rank), self.tokens.first_positions)


@dataclass(frozen=True)
class ShardedPlan(ContextParallelPlan):
    """Plan for sharded KV pools.

    `ContextParallel.plan` makes it if there is a placement. Block tables and slots are logical, as
    if one pool held all keys.

    Attributes
    ----------
    placement : Placement
        Owner of each logical slot.
    exchange : str
        Requested communication of rows and keys in ``attend``; "auto" decides by sizes.
    max_scratch_bytes : int
        Most bytes that "gather" may use for keys at a time.
    batch : ShardedBatch
        Rows and keys of all ranks.
    mesh : tuple of tuples of int, or None
        Ranks in a row for each place on the ring, or None without two dimensions.
    metadata, page_size, tokens, cp_rank, rows_per_rank, packed_custom_mask, num_pairs, \
num_padding_tokens, terms
        See `ContextParallelPlan`.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan([3], [5], block_tables=[[2, 0]])
    >>> plan.exchange, plan.kv_counts
    ('auto', (5,))
    >>> dist.destroy_process_group()
    """

    placement: Placement
    exchange: str
    max_scratch_bytes: int
    batch: ShardedBatch = field(compare=False, repr=False)
    mesh: Mesh | None = None

    @property
    def kv_counts(self) -> tuple[int, ...]:
        """Number of keys of the batch that each rank holds, cached and new."""
        owners = range(self.placement.shard_size)
        return tuple(int(self.batch.shares.counts(rank).sum()) for rank in owners)

    def held_rows(self, window: int | None) -> _core.HeldRows:
        """Count each rank's rows that an exchange moves; layers with the same window share it."""
        batch = self.batch
        return batch.once(
            ("held", window),
            lambda: batch.shares.keys.held_rows(
                batch.tokens.padded_counts, self.rows_per_rank, batch.owner, window
            ),
        )

    @property
    def local_slots(self) -> NDArray[np.int64]:
        """Row of each new token in this rank's pools, -1 for tokens of other ranks."""
        return self.batch.slots_of(self.cp_rank)[self.gathered_rows.numpy()]

    @property
    def local_rows(self) -> slice:
        """This rank's rows among the rows of all ranks."""
        begin = sum(self.rows_per_rank[: self.cp_rank])
        return slice(begin, begin + self.num_local_rows)


@dataclass(frozen=True)
class DecodePlan:
    """Plan of queries that every rank has, over sharded keys.

    `ContextParallel.plan_decode` makes it, once per step for all layers.

    Attributes
    ----------
    placement : Placement
        Owner of each logical slot.
    page_size : int
        Tokens per logical page.
    cp_rank : int
        Rank of this plan.
    batch : ShardedBatch
        Rows and keys of all ranks.
    terms : tuple of int
        Digests that the ranks compare before they exchange rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> from cpattn.kv import PageInterleave
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4,
    ...                      placement=PageInterleave(shard_size=1, page_size=4))
    >>> plan = cp.plan_decode([5, 3], block_tables=[[2, 0], [1, -1]])
    >>> plan.slots, plan.num_tokens
    (array([0, 6]), 2)
    >>> dist.destroy_process_group()
    """

    placement: Placement
    page_size: int
    cp_rank: int
    batch: ShardedBatch = field(compare=False, repr=False)
    terms: tuple[int, ...] = field(repr=False)

    @property
    def slots(self) -> NDArray[np.int64]:
        """Logical slot of each query's own token, int64 [num_tokens], read-only."""
        return self.batch.tokens.slots

    @property
    def local_slots(self) -> NDArray[np.int64]:
        """Row of each new token in this rank's pools, -1 for tokens of other ranks."""
        return self.batch.slots_of(self.cp_rank)

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.placement.shard_size

    @property
    def num_tokens(self) -> int:
        """Number of queries of the step."""
        return int(self.batch.tokens.q_lens.sum())


Plan = ContextParallelPlan | DecodePlan


def check_plan(call: str, plan: object, kind: type[Plan] = ContextParallelPlan) -> None:
    """Refuse an object that is no plan, or a plan of another method."""
    if not isinstance(plan, kind):
        method = "plan_decode" if kind is DecodePlan else "plan"
        raise TypeError(
            f"ContextParallel.{call}: plan must be one of ContextParallel.{method}, got "
            f"{type(plan).__name__}"
        )


def check_rank(
    call: str, exchange: RowExchange, plan: Plan, kind: type[Plan] = ContextParallelPlan
) -> None:
    """Refuse an object that is no plan, or a plan of another rank or group."""
    check_plan(call, plan, kind)
    of = (plan.cp_rank, plan.cp_size)
    if of != (exchange.rank, exchange.size):
        raise ValueError(
            f"ContextParallel.{call}: plan must be of rank {exchange.rank} of {exchange.size}, "
            f"got rank {of[0]} of {of[1]}"
        )


def shard_plan(
    plan: ContextParallelPlan,
    *,
    placement: Placement,
    exchange: str,
    max_scratch_bytes: int,
    mesh: Mesh | None = None,
) -> ShardedPlan:
    """Make the plan for pools in which the placement assigns slots to ranks."""
    batch = _batch(plan.tokens, plan.packed_custom_mask, placement)
    values: dict[str, Any] = {item.name: getattr(plan, item.name) for item in fields(plan)}
    values["terms"] = (*plan.terms[:-1], _placement_digest(placement, batch))
    return ShardedPlan(
        **values, placement=placement, exchange=exchange, max_scratch_bytes=max_scratch_bytes,
        batch=batch, mesh=mesh,
    )  # fmt: skip


def make_decode_plan(
    kv_lens: Any,
    *,
    q_lens: Any,
    block_tables: Any,
    page_size: int,
    placement: Placement,
    cp_rank: int,
    custom_mask: Any,
    packed_custom_mask: Any,
) -> DecodePlan:
    """Make the plan of ContextParallel.plan_decode."""
    call = "ContextParallel.plan_decode"
    lengths = index_array("kv_lens", kv_lens, 1, call).astype(np.int64)
    queries = np.ones_like(lengths)
    if q_lens is not None:
        queries = index_array("q_lens", q_lens, 1, call).astype(np.int64)
    if queries.shape != lengths.shape or not len(lengths):
        raise ValueError(
            f"{call}: q_lens and kv_lens must have an entry for each request, and one at least, "
            f"got {len(queries)} and {len(lengths)}"
        )
    bad = np.flatnonzero((queries < 0) | (queries > lengths))
    if len(bad):
        i = int(bad[0])
        raise ValueError(
            f"{call}: q_lens must be from 0 to kv_lens, which count the new tokens too, got "
            f"q_lens[{i}] = {queries[i]} for kv_lens[{i}] = {lengths[i]}"
        )
    planned = planned_pages(
        call, lengths, queries, page_size, block_tables=block_tables, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
    )  # fmt: skip
    batch = _batch(NewTokens(planned.pages, queries), planned.mask, placement)
    return DecodePlan(
        placement=placement,
        page_size=page_size,
        cp_rank=cp_rank,
        batch=batch,
        terms=(
            digest(lengths, queries),
            digest(f"decode {page_size} {placement.shard_size}".encode()),
            *planned.terms,
            _placement_digest(placement, batch),
        ),
    )


def _batch(tokens: NewTokens, mask: NDArray[np.uint8] | None, placement: Placement) -> ShardedBatch:
    row_mask = None
    if mask is not None:
        q_lens, row_bits = tokens.padded_lens  # padding tokens included
        sizes = -(-q_lens * row_bits // 8)
        row_mask = RowMask(mask, np.cumsum(sizes) - sizes, row_bits, tokens.first_positions)
    return ShardedBatch(KeyShares(placement, tokens.pages), placement, tokens, row_mask)


def _placement_digest(placement: Placement, batch: ShardedBatch) -> int:
    """Digest the sizes of a cpattn placement, or the slots that another object assigns."""
    if has_telling_name(placement):
        return digest(repr(placement).encode())
    assert batch.shares.placed is not None  # all slots of the pages were asked for
    return digest(*batch.shares.placed, *batch.located)
