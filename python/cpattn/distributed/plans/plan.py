# SPDX-License-Identifier: Apache-2.0
"""Plan of one batch on one rank: metadata, pages and slots, all checked here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ... import _core
from ...context_parallel.metadata import ContextParallelMetadata
from ..transport.terms import digest
from .masks import packed_mask
from .tokens import NewTokens, index_array

_PLAN = "ContextParallel.plan"


@dataclass(frozen=True)
class ContextParallelPlan:
    """Plan of one batch for one rank: which rank computes and stores which tokens, for all layers.

    `ContextParallel.plan` makes it. Two plans of a rank are equal if tokens, pages and slots are
    equal.

    Attributes
    ----------
    metadata : ContextParallelMetadata
        Tokens of each rank, and the keys that they see.
    page_size : int
        Tokens per page.
    tokens : NewTokens
        Pages and lengths of the new tokens; lists their slots and rows on demand.
    cp_rank : int
        Rank of this plan.
    rows_per_rank : tuple of int
        Number of tokens that each rank computes, without physical padding.
    packed_custom_mask : array, uint8, read-only, or None
        Mask of all tokens, padding tokens included, as `paged_attention` takes it.
    num_pairs : int
        Number of pairs of a new token and a key up to its own, without padding tokens.
    num_padding_tokens : int
        Number of padding tokens after the last request.
    terms : tuple of int
        Digests of the parts that all ranks share; ranks compare them before they exchange rows.

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
    tokens: NewTokens = field(compare=False, repr=False)
    cp_rank: int
    rows_per_rank: tuple[int, ...]
    packed_custom_mask: NDArray[np.uint8] | None = field(compare=False, repr=False)
    num_pairs: int
    num_padding_tokens: int
    terms: tuple[int, ...] = field(repr=False)  # one for each of PLAN_TERMS

    @cached_property
    def block_tables(self) -> NDArray[np.int32]:
        """Pages of each request, int32 [bs, pages], read-only, -1 after its last.

        The last request includes pages of padding tokens.
        """
        return self.tokens.pages.tables(self.num_padding_tokens)

    @property
    def slots(self) -> NDArray[np.int64]:
        """Pool row of each new token, int64 [num_tokens], read-only, -1 if none is written."""
        return self.tokens.slots

    @property
    def gathered_rows(self) -> torch.Tensor:
        """Index of each token in the concatenated rows of all ranks, int64 [num_tokens]."""
        return self.tokens.gathered_rows

    @property
    def num_tokens(self) -> int:
        """Number of new tokens on all ranks, padding tokens included."""
        return sum(self.rows_per_rank)

    @cached_property
    def own_slots(self) -> NDArray[np.int64]:
        """Pool row of each of this rank's tokens, for ranks that write to one pool.

        The row is -1 if none is written. Tokens of any rank, such as padding tokens, may share a
        row; only the last of them has it, and the others have -1.
        """
        return self._slots_written_once[np.asarray(self.metadata.local_q_indices, np.int64)]

    @cached_property
    def slots_by_rank(self) -> list[NDArray[np.int64]]:
        """Pool row of each token, as in `own_slots`, one rank after another."""
        return np.split(self.row_slots, np.cumsum(self.rows_per_rank)[:-1])

    @cached_property
    def row_slots(self) -> NDArray[np.int64]:
        """Pool row of each row of all ranks, as in `own_slots`."""
        slots = np.empty(self.num_tokens, np.int64)
        slots[self.gathered_rows.numpy()] = self._slots_written_once
        return slots

    @cached_property
    def _slots_written_once(self) -> NDArray[np.int64]:
        """Return the slot of each token, or -1 if a later token has the same slot."""
        if not self.num_padding_tokens:  # other tokens share no slot
            return self.slots
        slots = np.full(self.num_tokens, -1)
        _, last = np.unique(self.slots[::-1], return_index=True)
        last = self.num_tokens - 1 - last
        slots[last] = self.slots[last]
        return slots

    @cached_property
    def pages_in_order(self) -> tuple[torch.Tensor, NDArray[np.int32]]:
        """Return the pages of the batch, each once, and tables for a pool of only these pages."""
        used = self.block_tables >= 0
        pages, places = np.unique(self.block_tables[used], return_inverse=True)
        tables = np.full(self.block_tables.shape, -1, dtype=np.int32)
        tables[used] = places
        return torch.from_numpy(pages.astype(np.int64)), tables

    @property
    def cp_size(self) -> int:
        """Number of ranks."""
        return len(self.rows_per_rank)

    @property
    def num_local_rows(self) -> int:
        """Tokens of this rank, without physical padding."""
        return self.rows_per_rank[self.cp_rank]

    @property
    def num_physical_rows(self) -> int:
        """Number of this rank's rows, with physical padding if the plan has it."""
        return int(self.metadata.per_rank_actual_token[self.cp_rank])


class PlannedPages(NamedTuple):
    """Checked pages, given slots and mask of a batch, with digests of all three."""

    pages: _core.BatchPages
    slots: NDArray[np.int64] | None
    mask: NDArray[np.uint8] | None
    terms: tuple[int, int, int]


def planned_pages(
    call: str,
    lens: NDArray[np.int64],
    extends: NDArray[np.int64],
    page_size: int,
    *,
    block_tables: Any,
    out_cache_loc: Any = None,
    padding: int = 0,
    custom_mask: Any,
    packed_custom_mask: Any,
) -> PlannedPages:
    """Check the pages, slots and mask of a batch with `extends` new tokens."""
    tables = index_array("block_tables", block_tables, 2, call)
    pages = _core.BatchPages(tables, lens, page_size, call)
    slots = None
    if out_cache_loc is not None:
        slots = index_array("out_cache_loc", out_cache_loc, 1, call).astype(np.int64)
    slots_term = pages.checked_slots(slots, extends, padding, call)
    mask = packed_mask(custom_mask, packed_custom_mask, extends, lens, padding, call)
    if mask is not None:
        mask.flags.writeable = False
    mask_term = digest() if mask is None else digest(mask)
    return PlannedPages(pages, slots, mask, (pages.digest(), slots_term, mask_term))


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
    """Make a plan for `ContextParallel.plan`; metadata has the same extend_lens, unpadded."""
    extends = index_array("extend_lens", extend_lens, 1, _PLAN).astype(np.int64)
    prefixes = np.asarray(metadata.prefix_lens, dtype=np.int64)
    padding = metadata.total_seq_lens - int(extends.sum())
    planned = planned_pages(
        _PLAN, prefixes + extends, extends, page_size, block_tables=block_tables,
        out_cache_loc=out_cache_loc, padding=padding, custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
    )  # fmt: skip
    split = (metadata.strategy, metadata.weights, metadata.page_size)
    return ContextParallelPlan(
        metadata=metadata.pad_to_physical() if pad_to_physical else metadata,
        page_size=page_size,
        tokens=NewTokens(planned.pages, extends, padding, planned.slots, metadata),
        cp_rank=metadata.cp_rank,
        rows_per_rank=tuple(metadata.per_rank_actual_token),
        terms=(
            digest(prefixes, extends, np.int64(padding)),
            digest(f"{split} {page_size} {metadata.cp_size}".encode()),
            *planned.terms,
            digest(),
        ),
        packed_custom_mask=planned.mask,
        num_pairs=int((extends * prefixes + extends * (extends + 1) // 2).sum()),
        num_padding_tokens=padding,
    )
