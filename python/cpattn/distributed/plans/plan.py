# SPDX-License-Identifier: Apache-2.0
"""The plan of one batch on one rank: metadata, pages and slots, all checked here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...context_parallel.metadata import ContextParallelMetadata
from ..transport.exchange import digest
from .masks import packed_mask

_PLAN = "ContextParallel.plan"


@dataclass(frozen=True)
class ContextParallelPlan:
    """Who computes and stores what for one batch, seen from one rank; reusable for every layer.

    `ContextParallel.plan` makes them. Plans of the same rank are equal if their tokens, pages and
    slots are.

    Attributes
    ----------
    metadata : ContextParallelMetadata
        Which tokens each rank has, and what they see.
    page_size : int
        Tokens of a page.
    block_tables : array [bs, pages], int32, read-only
        The pages of each request, -1 after its last. With padding tokens the last request has
        pages for these, too.
    slots : array [num_tokens], int64, read-only
        The pool row of each new token, -1 where none is written.
    cp_rank : int
        The rank that the plan is for.
    rows_per_rank : tuple of int
        The tokens each rank computes, without physical padding.
    gathered_rows : torch.Tensor [num_tokens], int64
        Where each token stands when the rows of all ranks follow each other.
    packed_custom_mask : array, uint8, read-only, or None
        The mask of all tokens, as `paged_attention` takes it, padding tokens included.
    num_pairs : int
        Pairs of a new token and a key up to its own, padding tokens left out: what is computed.
    num_padding_tokens : int
        New tokens that the last request has more than it was given, as padding.
    terms : tuple of int
        Digests of what the plans of all ranks have in common: the ranks compare them before they
        exchange rows.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> from cpattn.distributed import ContextParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = ContextParallel(dist.group.WORLD, page_size=4)
    >>> plan = cp.plan([3], [5], block_tables=[[2, 0]])    # tokens 2 to 4 behind two cached ones
    >>> plan.slots, plan.num_tokens, plan.num_local_rows
    (array([10, 11,  0]), 3, 3)
    >>> dist.destroy_process_group()
    """

    metadata: ContextParallelMetadata = field(compare=False)
    page_size: int
    block_tables: NDArray[np.int32] = field(compare=False)
    slots: NDArray[np.int64] = field(compare=False)
    cp_rank: int
    rows_per_rank: tuple[int, ...]
    gathered_rows: torch.Tensor = field(compare=False, repr=False)
    packed_custom_mask: NDArray[np.uint8] | None = field(compare=False, repr=False)
    num_pairs: int
    num_padding_tokens: int
    terms: tuple[int, ...] = field(repr=False)  # one for each of PLAN_TERMS

    @property
    def num_tokens(self) -> int:
        """New tokens on all ranks, padding tokens included."""
        return len(self.slots)

    @cached_property
    def own_slots(self) -> NDArray[np.int64]:
        """The pool row of each of this rank's tokens, where ranks write to one pool.

        -1 where none is written, also where a later token, of any rank, has the same: padding
        tokens may.
        """
        return self._slots_written_once[np.asarray(self.metadata.local_q_indices, np.int64)]

    @cached_property
    def slots_by_rank(self) -> list[NDArray[np.int64]]:
        """What `own_slots` is, for the tokens of each rank."""
        tokens = np.empty(self.num_tokens, np.int64)
        tokens[self.gathered_rows.numpy()] = np.arange(self.num_tokens)
        ends = np.cumsum(self.rows_per_rank)
        return np.split(self._slots_written_once[tokens], ends[:-1])

    @cached_property
    def _slots_written_once(self) -> NDArray[np.int64]:
        """The slot of each token, but -1 where a later one has the same."""
        slots = np.full(self.num_tokens, -1)
        _, last = np.unique(self.slots[::-1], return_index=True)
        last = self.num_tokens - 1 - last
        slots[last] = self.slots[last]
        return slots

    @cached_property
    def pages_in_order(self) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """The pages of the batch, each once, and its tables for a pool of these alone."""
        used = self.block_tables >= 0
        pages, places = np.unique(self.block_tables[used], return_inverse=True)
        tables = np.full(self.block_tables.shape, -1, dtype=np.int32)
        tables[used] = places
        return torch.from_numpy(pages.astype(np.int64)), tables

    @property
    def num_local_rows(self) -> int:
        """Tokens of this rank, without physical padding."""
        return self.rows_per_rank[self.cp_rank]

    @property
    def num_physical_rows(self) -> int:
        """Rows of this rank with physical padding, where the plan has it."""
        return int(self.metadata.per_rank_actual_token[self.cp_rank])


def make_plan(
    metadata: ContextParallelMetadata,
    extend_lens: Any,
    *,
    block_tables: Any,
    out_cache_loc: Any,
    page_size: int,
    pad_to_physical: bool,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
) -> ContextParallelPlan:
    """See ContextParallel.plan; metadata is built from the same extend_lens, not yet padded."""
    extends = index_array("extend_lens", extend_lens, 1)
    prefixes = np.asarray(metadata.prefix_lens, dtype=np.int64)
    padding = metadata.total_seq_lens - int(extends.sum())
    tables = used_pages(block_tables, prefixes + extends, padding, page_size)
    slots = table_slots(tables, prefixes, extends, padding, page_size)
    num_real = len(slots) - padding
    if out_cache_loc is not None:
        slots = _checked_slots(out_cache_loc, slots, num_real)
    refuse_shared_slots(slots[:num_real])
    mask = packed_mask(custom_mask, packed_custom_mask, extends, prefixes + extends, padding)

    rows = tuple(metadata.per_rank_actual_token)
    bounds = np.cumsum((0, *rows))
    gathered_rows = metadata.unshard(
        [np.arange(begin, begin + n) for begin, n in zip(bounds, rows, strict=False)]
    )
    plan = ContextParallelPlan(
        metadata=metadata.pad_to_physical() if pad_to_physical else metadata,
        page_size=page_size,
        block_tables=tables,
        slots=slots,
        cp_rank=metadata.cp_rank,
        rows_per_rank=rows,
        gathered_rows=torch.from_numpy(gathered_rows),
        terms=(
            digest(prefixes, extends, np.int64(padding)),
            digest(f"{metadata.strategy} {page_size} {metadata.cp_size}".encode()),
            digest(tables),
            digest(slots),
            digest() if mask is None else digest(mask),
            digest(),
        ),
        packed_custom_mask=mask,
        num_pairs=int((extends * prefixes + extends * (extends + 1) // 2).sum()),
        num_padding_tokens=padding,
    )
    for array in (tables, slots, mask):
        if array is not None:
            array.flags.writeable = False
    return plan


def index_array(name: str, values: Any, ndim: int, call: str = _PLAN) -> NDArray[np.int64]:
    """A copy of an index argument."""
    try:
        array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except Exception as error:
        raise TypeError(
            f"{call}: {name} must be integers in {ndim} dimensions, got {type(values).__name__}"
        ) from error
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{call}: {name} must not be masked")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{call}: {name} must be integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(
            f"{call}: {name} must have {ndim} dimensions, got shape {list(array.shape)}"
        )
    return array.astype(np.int64)


def used_pages(
    values: Any, seq_lens: NDArray[np.int64], padding: int, page_size: int, call: str = _PLAN
) -> NDArray[np.int32]:
    """The pages of the sequences alone, -1 after the last of each.

    Only padding tokens see keys after the last sequence; its first page serves for these.
    """
    given = index_array("block_tables", values, 2, call)
    num_pages = -(-seq_lens // page_size)
    if len(given) != len(seq_lens) or given.shape[1] < num_pages.max():
        raise ValueError(
            f"{call}: block_tables must be [bs, >= ceil(max(seq_lens) / page_size)] "
            f"= [{len(seq_lens)}, >= {num_pages.max()}], got shape {list(given.shape)}"
        )
    used = np.arange(given.shape[1]) < num_pages[:, None]
    bad = np.argwhere(used & ((given < 0) | (given > np.iinfo(np.int32).max)))
    if len(bad):
        raise ValueError(
            f"{call}: block_tables must hold page ids, int32 and >= 0, "
            f"got block_tables{bad[0].tolist()} = {given[tuple(bad[0])]}"
        )
    padded_pages = -(-(seq_lens[-1] + padding) // page_size)
    tables = np.full((len(given), max(num_pages.max(), padded_pages)), -1, dtype=np.int32)
    width = min(tables.shape[1], given.shape[1])
    tables[:, :width] = np.where(used, given, -1)[:, :width]
    tables[-1, num_pages[-1] : padded_pages] = tables[-1, 0] if num_pages[-1] else 0
    return tables


def table_slots(
    tables: NDArray[np.int32],
    prefixes: NDArray[np.int64],
    extends: NDArray[np.int64],
    padding: int,
    page_size: int,
) -> NDArray[np.int64]:
    """The pool row of each new token, -1 for padding tokens."""
    request = np.repeat(np.arange(len(extends)), extends)
    first = np.cumsum(extends) - extends
    position = np.arange(len(request)) - (first - prefixes)[request]
    page = tables[request, position // page_size].astype(np.int64)
    return np.append(page * page_size + position % page_size, np.full(padding, -1))


def _checked_slots(values: Any, expected: NDArray[np.int64], num_real: int) -> NDArray[np.int64]:
    slots = index_array("out_cache_loc", values, 1)
    if slots.shape != expected.shape:
        raise ValueError(
            f"ContextParallel.plan: out_cache_loc must have {len(expected)} entries, "
            f"one for each token, got {len(slots)}"
        )
    good = (slots == -1) | (slots == expected)
    good[num_real:] = slots[num_real:] >= -1
    if not good.all():
        i = int(good.argmin())
        rule = f"{expected[i]}, where the block tables have the token" if i < num_real else ">= 0"
        raise ValueError(
            f"ContextParallel.plan: out_cache_loc[{i}] must be -1 or {rule}, got {slots[i]}"
        )
    return slots


def refuse_shared_slots(slots: NDArray[np.int64], call: str = _PLAN) -> None:
    """Two tokens in one pool row: requests share a page that is yet to be written."""
    ordered = np.sort(slots)
    shared = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)]
    if len(shared):
        tokens = np.flatnonzero(slots == shared[0])[:2].tolist()
        raise ValueError(
            f"{call}: block_tables must give each new token a pool row of its own, "
            f"got row {shared[0]} for tokens {tokens[0]} and {tokens[1]}"
        )
