# SPDX-License-Identifier: Apache-2.0
"""Plans of batches whose keys are sharded: who holds what, and what each rank lets rows see."""

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
from .sequence_calls import Positions, RowMask, SequenceCall, Sides, Visibility, sequence_calls
from .tokens import NewTokens, Rows, index_array

Made = TypeVar("Made")


@dataclass(frozen=True)
class ShardedBatch:
    """The queries of a batch, and which rank holds which of its keys and of its new tokens."""

    shares: KeyShares
    placement: Placement
    tokens: NewTokens
    mask: RowMask | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # what layers share

    def once(self, key: Any, make: Callable[[], Made]) -> Made:
        """Return what layers share, made when one of them asks for it first."""
        if key not in self.memo:
            self.memo[key] = make()
        made: Made = self.memo[key]
        return made

    @property
    def rows(self) -> Rows:
        """All queries; of a prefill rank after rank."""
        return self.tokens.rows

    @cached_property
    def located(self) -> tuple[Array, Array]:
        """The owner of each row's slot, and the row of its pool; -1 where none is written."""
        slots = self.tokens.row_slots
        written = slots >= 0
        owner, local = np.full((2, len(slots)), -1, dtype=np.int64)
        owner[written], local[written] = located(self.placement, slots[written])
        return owner, local

    @property
    def owner(self) -> Array:
        """The owner of each new token's slot, -1 where none is written; in the order of `rows`."""
        return self.located[0]

    @property
    def local_slots(self) -> Array:
        """The row of its owner's pool for each new token."""
        return self.located[1]

    @property
    def visible_keys(self) -> Array:
        """Number of keys of its request that each query sees if it sees all up to its own."""
        return np.minimum(self.rows.position + 1, self.shares.kv_lens[self.rows.request])

    def slots_of(self, rank: int) -> Array:
        """The row of a rank's pool for each new token, -1 for those of other ranks."""
        return np.where(self.owner == rank, self.local_slots, -1)

    def check_pool(self, call: str, rank: int, num_slots: int) -> None:
        """Refuse a pool that has not all rows where the rank holds keys."""
        pages = self.shares.local_pages(rank)
        if len(pages.ids) and (pages.ids.max() + 1) * pages.page_size > num_slots:
            raise ValueError(
                f"ContextParallel.{call}: the shard of rank {rank} must have the "
                f"{(pages.ids.max() + 1) * pages.page_size} rows that the block tables need, got "
                f"{num_slots}"
            )

    def calls(self, rank: int, rows: slice, *, causal: bool, window: Sides) -> list[SequenceCall]:
        """Return the calls by which the rows see the keys of a rank where its pool has them.

        They are made once for all layers with this visibility.
        """
        return self.once(
            (rank, rows.start, rows.stop, causal, window),
            lambda: sequence_calls(
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
    """A plan for KV pools of which each rank holds a share.

    `ContextParallel.plan` makes them where a placement was given. Block tables and slots are those
    of logical pages, as if one pool held everything.

    Attributes
    ----------
    placement : Placement
        Who holds each logical slot.
    exchange : str
        How ``attend`` is asked to bring rows and keys together; "auto" leaves it to the sizes.
    max_scratch_bytes : int
        What "gather" may take for keys at a time.
    batch : ShardedBatch
        Rows and keys of all ranks.
    mesh : tuple of tuples of int, or None
        The ranks in rows, where they are in two dimensions: each row for a place on the ring.
    metadata, page_size, tokens, block_tables, slots, cp_rank, rows_per_rank, gathered_rows
        As of `ContextParallelPlan`.
    packed_custom_mask, num_pairs, num_padding_tokens, terms
        As of `ContextParallelPlan`.

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
        """The keys of the batch that each rank holds, cached and new ones."""
        owners = range(self.placement.shard_size)
        return tuple(int(self.batch.shares.counts(rank).sum()) for rank in owners)

    def held_rows(self, window: int | None) -> _core.HeldRows:
        """Count the rows of each rank that an exchange moves; made once for layers of a window."""
        batch = self.batch
        return batch.once(
            ("held", window),
            lambda: batch.shares.keys.held_rows(
                batch.tokens.padded_counts, self.rows_per_rank, batch.owner, window
            ),
        )

    @property
    def local_slots(self) -> NDArray[np.int64]:
        """The row of this rank's pools for each new token, -1 for those that it does not hold."""
        return self.batch.slots_of(self.cp_rank)[self.gathered_rows.numpy()]

    @property
    def local_rows(self) -> slice:
        """This rank's rows among those of all ranks."""
        begin = sum(self.rows_per_rank[: self.cp_rank])
        return slice(begin, begin + self.num_local_rows)


@dataclass(frozen=True)
class DecodePlan:
    """Queries that every rank has, over keys of which each rank holds a share.

    `ContextParallel.plan_decode` makes them, once per step for all layers.

    Attributes
    ----------
    placement : Placement
        Who holds each logical slot.
    page_size : int
        Tokens of a logical page.
    cp_rank : int
        The rank that the plan is for.
    slots : array [num_tokens], int64, read-only
        The logical slot of each query's own token.
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
        """The logical slot of each query's own token."""
        return self.batch.tokens.slots

    @property
    def local_slots(self) -> NDArray[np.int64]:
        """The row of this rank's pools for each new token, -1 for those that it does not hold."""
        return self.batch.slots_of(self.cp_rank)

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return self.placement.shard_size

    @property
    def num_tokens(self) -> int:
        """Queries of the step."""
        return int(self.batch.tokens.q_lens.sum())


Plan = ContextParallelPlan | DecodePlan


def check_plan(call: str, plan: object, kind: type[Plan] = ContextParallelPlan) -> None:
    """Refuse what is no plan, and one of another method."""
    if not isinstance(plan, kind):
        method = "plan_decode" if kind is DecodePlan else "plan"
        raise TypeError(
            f"ContextParallel.{call}: plan must be one of ContextParallel.{method}, got "
            f"{type(plan).__name__}"
        )


def check_rank(
    call: str, exchange: RowExchange, plan: Plan, kind: type[Plan] = ContextParallelPlan
) -> None:
    """Refuse what is no plan, and one of another rank or group."""
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
    """The plan for pools of which each rank holds what the placement gives it."""
    batch = _batch(plan.tokens, plan.packed_custom_mask, placement)
    values: dict[str, Any] = {item.name: getattr(plan, item.name) for item in fields(plan)}
    values["terms"] = (*plan.terms[:-1], _placement_digest(placement, batch))
    return ShardedPlan(
        **values,
        placement=placement,
        exchange=exchange,
        max_scratch_bytes=max_scratch_bytes,
        batch=batch,
        mesh=mesh,
    )


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
    """See ContextParallel.plan_decode."""
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
        q_lens, row_bits = tokens.padded_lens  # of padding tokens, too
        sizes = -(-q_lens * row_bits // 8)
        row_mask = RowMask(mask, np.cumsum(sizes) - sizes, row_bits, tokens.first_positions)
    return ShardedBatch(KeyShares(placement, tokens.pages), placement, tokens, row_mask)


def _placement_digest(placement: Placement, batch: ShardedBatch) -> int:
    """Digest the sizes of a placement of cpattn, of another object where it puts the batch."""
    if has_telling_name(placement):
        return digest(repr(placement).encode())
    assert batch.shares.placed is not None  # it was asked for all slots of the pages
    return digest(*batch.shares.placed, *batch.located)
