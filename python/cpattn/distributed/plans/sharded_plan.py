# SPDX-License-Identifier: Apache-2.0
"""Plans of batches whose keys are sharded: who holds what, and what each rank lets rows see."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kv import Placement
from ..transport.exchange import PLAN_TERMS, digest
from .key_shares import Array, KeyShares
from .masks import packed_mask
from .mesh import Mesh
from .placed import has_telling_name, located
from .plan import ContextParallelPlan, index_array, refuse_shared_slots, table_slots, used_pages
from .sequence_calls import RowMask, Rows, SequenceCall, Visibility, sequence_calls


@dataclass(frozen=True)
class ShardedBatch:
    """The queries of a batch, and which rank holds which of its keys and of its new tokens."""

    shares: KeyShares
    rows: Rows  # of all queries; of a prefill rank after rank
    mask: RowMask | None
    owner: Array  # of each new token's slot, -1 where none is written; as `rows`
    local_slots: Array  # the row of the owner's pool
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # what layers share

    @property
    def visible_keys(self) -> Array:
        """How many keys of its request each query sees if it sees all up to its own."""
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

    def calls(
        self, rank: int, rows: slice, *, causal: bool, window: int | None
    ) -> list[SequenceCall]:
        """How the rows see the keys of a rank where its pool has them.

        Made once for all layers with this visibility.
        """
        key = (rank, rows.start, rows.stop, causal, window)
        if key not in self.memo:
            visibility = Visibility(causal, window, self.mask)
            chosen = Rows(self.rows.request[rows], self.rows.position[rows])
            where = self.shares.local_pages(rank)
            self.memo[key] = sequence_calls(self.shares, rank, where, chosen, visibility)
        calls: list[SequenceCall] = self.memo[key]
        return calls


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
    metadata, page_size, block_tables, slots, cp_rank, rows_per_rank, gathered_rows
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
    slots: NDArray[np.int64] = field(compare=False)
    batch: ShardedBatch = field(compare=False, repr=False)
    terms: tuple[int, ...] = field(repr=False)

    @property
    def local_slots(self) -> NDArray[np.int64]:
        """The row of this rank's pools for each new token, -1 for those that it does not hold."""
        return self.batch.slots_of(self.cp_rank)

    @property
    def num_tokens(self) -> int:
        """Queries of the step."""
        return len(self.slots)


def shard_plan(
    plan: ContextParallelPlan,
    extend_lens: Any,
    *,
    placement: Placement,
    exchange: str,
    max_scratch_bytes: int,
    mesh: Mesh | None = None,
) -> ShardedPlan:
    """The plan for pools of which each rank holds what the placement gives it."""
    extends = index_array("extend_lens", extend_lens, 1)
    prefixes = np.asarray(plan.metadata.prefix_lens, dtype=np.int64)
    kv_lens = prefixes + extends
    lens = extends.copy()
    lens[-1] += plan.num_padding_tokens
    tokens = np.argsort(plan.gathered_rows.numpy())  # in the order of the ranks
    batch = _batch(
        plan.block_tables, prefixes, lens, kv_lens, plan.slots, plan.packed_custom_mask, placement,
        plan.page_size, tokens,
    )  # fmt: skip
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
    lengths = index_array("kv_lens", kv_lens, 1, call)
    queries = np.ones_like(lengths) if q_lens is None else index_array("q_lens", q_lens, 1, call)
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
    tables = used_pages(block_tables, lengths, 0, page_size, call)
    slots = table_slots(tables, lengths - queries, queries, 0, page_size)
    refuse_shared_slots(slots, call)
    mask = packed_mask(custom_mask, packed_custom_mask, queries, lengths, 0, call)
    batch = _batch(
        tables, lengths - queries, queries, lengths, slots, mask, placement, page_size,
        np.arange(len(slots)),
    )  # fmt: skip
    slots.flags.writeable = False
    terms = {
        "lengths": digest(lengths, queries),
        "strategy and page_size": digest(f"decode {page_size} {placement.shard_size}".encode()),
        "block_tables": digest(tables),
        "slots": digest(slots),
        "mask": digest() if mask is None else digest(mask),
        "placement": _placement_digest(placement, batch),
    }
    return DecodePlan(
        placement=placement,
        page_size=page_size,
        cp_rank=cp_rank,
        slots=slots,
        batch=batch,
        terms=tuple(terms[name] for name in PLAN_TERMS),
    )


def _batch(
    block_tables: NDArray[np.int32],
    first_positions: Array,
    q_lens: Array,
    kv_lens: Array,
    slots: Array,
    mask: NDArray[np.uint8] | None,
    placement: Placement,
    page_size: int,
    tokens: Array,
) -> ShardedBatch:
    """Of the queries of all requests, taken in the order of `tokens`."""
    request = np.repeat(np.arange(len(q_lens)), q_lens)
    begin = np.cumsum(q_lens) - q_lens
    position = np.arange(len(request)) + (first_positions - begin)[request]
    written = slots >= 0
    owner, local = np.full((2, len(slots)), -1, dtype=np.int64)
    owner[written], local[written] = located(placement, slots[written])
    row_mask = None
    if mask is not None:
        row_bits = first_positions + q_lens  # with padding tokens, which have bits, too
        sizes = -(-q_lens * row_bits // 8)
        row_mask = RowMask(mask, np.cumsum(sizes) - sizes, row_bits, first_positions)
    return ShardedBatch(
        shares=KeyShares(placement, block_tables, kv_lens, page_size),
        rows=Rows(request[tokens], position[tokens]),
        mask=row_mask,
        owner=owner[tokens],
        local_slots=local[tokens],
    )


def _placement_digest(placement: Placement, batch: ShardedBatch) -> int:
    """Digest the sizes of a placement of cpattn, of another object where it puts the batch."""
    if has_telling_name(placement):
        return digest(repr(placement).encode())
    shares = batch.shares
    return digest(shares.owner, shares.row, batch.owner, batch.local_slots)
