# SPDX-License-Identifier: Apache-2.0
"""Pages of a chunk that a prefill rank sends, and their places in the list of decode.

The rank's place and its server's flags select a filter of ``shards``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ... import _core
from ..._arguments import at_least, flag, part
from ..._types import Indices
from .pages import as_listed
from .shards import filter_kv_indices_for_cp_rank, filter_kv_indices_for_shard_rank


@dataclass(frozen=True)
class KVSender:
    """A prefill rank's place in the groups that divide the KV cache, and the flags of its server.

    Parameters
    ----------
    attn_cp_rank, attn_cp_size : int, optional
        Rank and size of the attention context-parallel group.
    kv_shard_rank, kv_shard_size : int, optional
        Rank and size of the group that stripes the pages of the KV cache; size 1 for no striping.
    enable_dsa_cache_layer_split : bool, optional
        Whether each context-parallel rank keeps a range of the layers.
    all_cp_ranks_transfer : bool, optional
        The switch SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.
    is_hybrid_mla_backend : bool, optional
        Whether the pool is of a hybrid model with MLA.
    enable_cp_tp_group_sharing : bool, optional
        Whether context-parallel ranks act as tensor-parallel ranks in transfers.

    Raises
    ------
    TypeError, ValueError
        If a number is no integer, a flag is no bool, or a rank is outside its group.

    Examples
    --------
    If four ranks hold the same, only the first sends, or with the switch each sends a share:

    >>> [KVSender(attn_cp_rank=r, attn_cp_size=4).is_dummy_cp_rank for r in range(4)]
    [False, True, True, True]
    >>> KVSender(1, 4, all_cp_ranks_transfer=True).enable_all_cp_ranks_for_transfer
    True
    """

    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    kv_shard_rank: int = 0
    kv_shard_size: int = 1
    enable_dsa_cache_layer_split: bool = False
    all_cp_ranks_transfer: bool = False
    is_hybrid_mla_backend: bool = False
    enable_cp_tp_group_sharing: bool = False

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith(("_rank", "_size")):
                checked = at_least(1 if name.endswith("_size") else 0, value, "KVSender", name)
            else:
                checked = flag(value, "KVSender", name)
            object.__setattr__(self, name, checked)
        for group in ("attn_cp", "kv_shard"):
            rank, size = getattr(self, f"{group}_rank"), getattr(self, f"{group}_size")
            if rank >= size:
                raise ValueError(
                    f"KVSender: {group}_rank must be in [0, {size}) of {group}_size, got {rank}"
                )

    @property
    def enable_all_cp_ranks_for_transfer(self) -> bool:
        """Whether all context-parallel ranks take part in transfers, not only the first."""
        divided = self.is_hybrid_mla_backend or self.enable_dsa_cache_layer_split
        return not self.enable_cp_tp_group_sharing and (
            self.all_cp_ranks_transfer
            or (self.attn_cp_size > 1 and divided)
            or self.kv_shard_size > 1
        )

    @property
    def is_dummy_cp_rank(self) -> bool:
        """Whether the rank sends nothing, because the first of its group sends all."""
        return (
            self.attn_cp_rank > 0
            and not self.enable_all_cp_ranks_for_transfer
            and not self.enable_cp_tp_group_sharing
        )

    @property
    def sends_replicated_state(self) -> bool:
        """Whether the rank sends state that all ranks of its context-parallel group hold.

        Only the first rank does, unless ranks hold different layers or pages of it or act as
        tensor-parallel ranks; then each rank does.
        """
        return (
            self.attn_cp_rank == 0
            or self.enable_dsa_cache_layer_split
            or self.enable_cp_tp_group_sharing
            or self.kv_shard_size > 1
        )


class KVSendIndices(NamedTuple):
    """Part of a chunk that a rank sends; the first four fields are what engines' senders return.

    Attributes
    ----------
    kv_indices : ints [n]
        Pages of the rank's pool.
    index_slice : slice, or array [n], int64
        Places of the pages in the destination's announced list; an array for a rank that holds
        every N-th page.
    is_last_chunk : bool
        Whether this chunk completes the transfer; metadata and states go with it.
    should_skip : bool
        Whether the rank sends nothing of it. If it is the last chunk, the rank then reports
        success.
    compat : bool
        Argument of `plan_send_indices`.

    Examples
    --------
    >>> sender = KVSender(kv_shard_rank=1, kv_shard_size=2)
    >>> indices = plan_send_indices(sender, [8, 9, 11], curr_idx=0, num_kv_indices=3)
    >>> src_pages, dst_pages = indices.select([30, 31, 32])
    >>> src_pages.tolist(), dst_pages
    ([4, 5], [31, 32])
    """

    kv_indices: Indices
    index_slice: slice | NDArray[np.int64]
    is_last_chunk: bool
    should_skip: bool
    compat: bool = False

    def select(self, dst_kv_indices: Indices) -> tuple[Indices, Indices]:
        """Select the pages of both sides, or none for a skipped chunk.

        Parameters
        ----------
        dst_kv_indices : ints [num_pages]
            The destination's pages for the whole transfer.

        Returns
        -------
        src_pages : of the type of ``kv_indices``, [n]
            With compat, cut to the number of destination pages in the slice.
        dst_pages : of the type of `dst_kv_indices`, or a list of int, [n]

        Raises
        ------
        TypeError
            If a page is no integer.
        ValueError
            If the destination has fewer pages than the rank sends.
        IndexError
            With compat, if a position is beyond the destination's pages.
        """
        function = "KVSendIndices.select"
        src = as_listed(self.kv_indices, function, "kv_indices")
        dst = as_listed(dst_kv_indices, function, "dst_kv_indices")
        if self.should_skip:
            return src[:0], dst[:0]
        where, num_dst = self.index_slice, len(dst)
        if not isinstance(where, slice):
            last = max(where.tolist(), default=-1)
            if last >= num_dst and self.compat:
                raise IndexError(f"{function}: index {last} is out of bounds of {num_dst} pages")
            if last >= num_dst:
                raise ValueError(
                    f"{function}: dst_kv_indices must have position {last}, got {num_dst} pages"
                )
            if isinstance(dst, np.ndarray):
                return src, dst[where]
            pages = _core.ints(dst, function, "dst_kv_indices")
            return src, [pages[position] for position in where.tolist()]
        dst = dst[where]
        if len(dst) < len(src) and not self.compat:
            raise ValueError(
                f"{function}: dst_kv_indices must have pages [{where.start}, {where.stop}), "
                f"got {num_dst} pages"
            )
        return src[: len(dst)], dst


KVSender.__module__ = KVSendIndices.__module__ = "cpattn.transfer.sglang_0_5_23"


def plan_send_indices(
    sender: Any, kv_indices: Indices, *, curr_idx: int, num_kv_indices: int, compat: bool = False
) -> KVSendIndices:
    """Decide which pages of a chunk a rank sends, and where they go.

    The first matching rule applies::

        the pages are striped      its own pages; a chunk without any is skipped, unless it is last
        all ranks send             its share of the request's pages, an empty one too
        it is a dummy rank         nothing
        else                       all pages: also of a layer split, which divides buffers

    Parameters
    ----------
    sender : KVSender, or any object with these attributes
        ``kv_shard_rank``, ``kv_shard_size``, ``attn_cp_rank``, ``attn_cp_size``,
        ``enable_all_cp_ranks_for_transfer``, ``enable_dsa_cache_layer_split``,
        ``is_dummy_cp_rank``.
    kv_indices : ints [num_pages]
        Pages of the chunk; logical pages if they are striped.
    curr_idx : int
        Pages of the transfer before this chunk.
    num_kv_indices : int
        All pages of the transfer; the chunk that ends there is the last.
    compat : bool, optional
        Whether to follow sglang 0.5.23 if the destination announced too few pages: a position
        beyond its list raises IndexError, slices are cut.

    Returns
    -------
    KVSendIndices

    Raises
    ------
    TypeError
        If `sender` lacks an attribute, or an argument has another type than stated.
    ValueError
        If a page is negative, the chunk exceeds the transfer, or a rank is outside its group.

    Examples
    --------
    Three ranks divide five pages; this chunk has the last three:

    >>> for rank in range(3):
    ...     sender = KVSender(rank, 3, all_cp_ranks_transfer=True)
    ...     print(plan_send_indices(sender, [7, 8, 9], curr_idx=2, num_kv_indices=5)[:2])
    ([], slice(2, 2, None))
    ([7, 8], slice(2, 4, None))
    ([9], slice(4, 5, None))
    """
    function = "plan_send_indices"
    compat = flag(compat, function, "compat")
    curr_idx = at_least(0, curr_idx, function, "curr_idx")
    num_kv_indices = at_least(0, num_kv_indices, function, "num_kv_indices")
    pages = as_listed(kv_indices, function, "kv_indices")
    end = curr_idx + len(pages)
    if end > num_kv_indices:
        raise ValueError(
            f"{function}: kv_indices must end within the {num_kv_indices} pages of the transfer, "
            f"got {len(pages)} from page {curr_idx} on"
        )
    shard_size, is_dummy = part(sender, ("kv_shard_size", "is_dummy_cp_rank"), function, "sender")
    all_ranks, layer_split = part(
        sender,
        ("enable_all_cp_ranks_for_transfer", "enable_dsa_cache_layer_split"),
        function,
        "sender",
    )
    chunk, is_last = slice(curr_idx, end), end == num_kv_indices
    if at_least(1, shard_size, function, "kv_shard_size") > 1:
        owned, positions = filter_kv_indices_for_shard_rank(
            kv_indices=pages,
            index_slice=chunk,
            shard_rank=part(sender, "kv_shard_rank", function, "sender"),
            shard_size=shard_size,
        )
        return KVSendIndices(owned, positions, is_last, len(owned) == 0 and not is_last, compat)
    if flag(all_ranks, function, "enable_all_cp_ranks_for_transfer") and not flag(
        layer_split, function, "enable_dsa_cache_layer_split"
    ):
        share, where = filter_kv_indices_for_cp_rank(sender, pages, chunk, num_kv_indices)
        return KVSendIndices(share, where, is_last, False, compat)
    should_skip = flag(is_dummy, function, "is_dummy_cp_rank")
    return KVSendIndices(pages, chunk, is_last, should_skip, compat)
