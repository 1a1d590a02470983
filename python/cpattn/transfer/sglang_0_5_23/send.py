# SPDX-License-Identifier: Apache-2.0
"""Plans of the senders of sglang 0.5.23: lists of KV buffers in, blocks to send out.

Functions check the lists and raise ValueError for entries that do not match, items outside their
buffer, and negative indices. With ``compat=True`` they plan what sglang would send, right or wrong,
without checks; if sglang would read beyond the end of a list, they raise IndexError.
`cpattn.transfer.plan_kv_transfer` plans from buffers that state their layer and kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _core
from ..._arguments import at_least, flag, integer, part
from ..._types import Indices
from ..plan import TransferPlan

Lengths = Sequence[int] | None


def plan_send_kvcache(
    kv_args: Any,
    dst_ptrs: Sequence[int],
    src_pages: Indices,
    dst_pages: Indices,
    *,
    pp_size: int,
    is_mla: bool,
    is_last_rank: bool = False,
    dst_item_lens: Lengths = None,
    dst_layer_ids: Indices | None = None,
    compat: bool = False,
) -> TransferPlan:
    """Plan the blocks of whole pages that a prefill stage sends to a decode server.

    With ``dst_layer_ids`` entries pair by layer, as in `build_transfer_entry_pairs`: K and V of a
    layer in list order, other layers and drafts at any place. Without ids, entries of a single
    stage pair by position, and the plan ignores a draft tail of the destination; with more stages
    the rules are those of `get_mla_kv_ptrs_with_pp` and `get_mha_kv_ptrs_with_pp`. Ranks that
    divide the layers (`get_layer_shard_range`) count as stages, too.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``kv_data_ptrs`` and ``kv_item_lens``. Several stages also need ``kv_layer_ids`` if entries
        pair by layer, else ``prefill_start_layer``. Optional are ``kv_data_lens``,
        ``prefill_end_layer``, ``kv_buf_groups``, ``total_kv_layers``, ``hidden_kv_layers`` and
        ``draft_kv_layers``.
    dst_ptrs : list of int
        The destination's ``kv_data_ptrs``.
    src_pages, dst_pages : ints [num_pages]
        Page ``src_pages[i]`` becomes page ``dst_pages[i]``. An empty list gives an empty plan.
    pp_size : int
        Pipeline stages of the prefill.
    is_mla : bool
        Whether the buffers are groups of a latent; False: they are K and V.
    is_last_rank : bool, optional
        Whether this is the last stage, which has the drafts.
    dst_item_lens : list of int, optional
        The destination's ``kv_item_lens``, which must equal the source's.
    dst_layer_ids : ints, optional
        The destination's ``kv_layer_ids``: the layer of each of its entries. sglang's senders for
        GPUs use them; its senders for NPUs only for latents of hybrid models with several stages.
    compat : bool, optional
        Whether to plan what sglang 0.5.23 sends, without checks.

    Returns
    -------
    TransferPlan
        One block per entry and run of pages, in the order of ``kv_data_ptrs``.

    Raises
    ------
    TypeError
        If `kv_args` lacks an attribute, or an argument has another type than stated.
    ValueError
        If entries do not match, item lengths differ, a page is negative or outside its buffer, or
        the lists of pages differ in length.
    RuntimeError
        If layer ids cannot be paired, or only one side has ids with several stages.
    IndexError
        With compat, if sglang would read beyond the end of a list.

    Examples
    --------
    >>> from cpattn.transfer.sglang_0_5_23 import KVArgs
    >>> args = KVArgs(kv_data_ptrs=[1000, 2000], kv_item_lens=[10, 20])
    >>> plan = plan_send_kvcache(args, [5000, 6000], [1, 2, 7], [4, 5, 6], pp_size=1, is_mla=True)
    >>> for block in zip(plan.src_addrs.tolist(), plan.dst_addrs.tolist(), plan.lengths.tolist()):
    ...     print(block)
    (1010, 5040, 20)
    (1070, 5060, 10)
    (2020, 6080, 40)
    (2140, 6120, 20)
    """
    function = "plan_send_kvcache"
    lists = kv_buffers(function, kv_args, dst_ptrs, dst_item_lens, dst_layer_ids)
    return _core.plan_send_kvcache(
        lists,
        src_pages,
        dst_pages,
        stage_fields(function, kv_args, is_last_rank, pp_size, is_mla, has_layer_ids(lists)),
        compat,
    )


class HeadSlice(NamedTuple):
    """Heads of a page that one rank sends to another.

    Attributes
    ----------
    src_start, dst_start : int
        First sent head within the source's page, and within the destination's.
    num_heads : int
        Number of sent heads.
    src_heads, dst_heads : int
        Number of heads in the source's page, and in the destination's.

    Examples
    --------
    Rank 1 of 2 has heads 2 and 3 of four, and rank 2 of 4 needs head 2:

    >>> slice_heads(4, prefill_tp_size=2, prefill_rank=1, decode_tp_size=4, decode_rank=2)
    HeadSlice(src_start=0, dst_start=0, num_heads=1, src_heads=2, dst_heads=1)
    """

    src_start: int
    dst_start: int
    num_heads: int
    src_heads: int
    dst_heads: int


HeadSlice.__module__ = "cpattn.transfer.sglang_0_5_23"


def slice_heads(
    total_kv_heads: int,
    *,
    prefill_tp_size: int,
    prefill_rank: int,
    decode_tp_size: int,
    decode_rank: int,
    compat: bool = False,
) -> HeadSlice:
    """Find the heads that a prefill rank sends to a decode rank of another tensor-parallel size.

    Ranks have equal shares of the heads in order; with more ranks than heads, neighbours have the
    same head.

    Parameters
    ----------
    total_kv_heads : int
        KV heads of the whole model.
    prefill_tp_size, prefill_rank, decode_tp_size, decode_rank : int
        Sizes of the attention groups, and ranks within them.
    compat : bool, optional
        Whether to answer even if the numbers do not fit each other.

    Returns
    -------
    HeadSlice
        Place of the heads in a page of either side.

    Raises
    ------
    TypeError
        If a number is no integer, or `compat` no bool.
    ValueError
        Without compat, if neither size divides the other, heads do not divide evenly, or the two
        ranks have no head in common.

    Examples
    --------
    >>> slice_heads(4, prefill_tp_size=8, prefill_rank=7, decode_tp_size=2, decode_rank=1)
    HeadSlice(src_start=0, dst_start=1, num_heads=1, src_heads=1, dst_heads=2)
    """
    return HeadSlice(
        *_core.slice_heads(
            total_kv_heads, prefill_tp_size, prefill_rank, decode_tp_size, decode_rank, compat
        )
    )


def plan_send_kvcache_slice(
    kv_args: Any,
    dst_ptrs: Sequence[int],
    src_pages: Indices,
    dst_pages: Indices,
    *,
    dst_tp_rank: int,
    dst_attn_tp_size: int,
    dst_kv_item_len: int,
    attn_tp_size: int,
    pp_size: int = 1,
    is_last_rank: bool = False,
    dst_layer_ids: Indices | None = None,
    compat: bool = False,
) -> TransferPlan:
    """Plan the blocks of K and V for a rank with other heads; MLA never needs it.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``engine_rank``, ``page_size``, ``kv_head_num`` or ``total_kv_head_num``, and the attributes
        of `plan_send_kvcache`. All ``kv_item_lens`` are equal.
    dst_ptrs, src_pages, dst_pages, pp_size, is_last_rank, dst_layer_ids
        See `plan_send_kvcache`.
    dst_tp_rank, dst_attn_tp_size : int
        The destination's rank and the size of its attention group.
    dst_kv_item_len : int
        Bytes of a page of the destination.
    attn_tp_size : int
        Size of the source's attention group.
    compat : bool, optional
        Whether to follow engines in layers: without layer ids, `get_mha_kv_ptrs_with_pp` then
        decides even for one stage, which needs ``prefill_start_layer``.

    Returns
    -------
    TransferPlan
        A block per entry, page and token; whole runs are joined if all heads of both sides go.

    Raises
    ------
    TypeError, ValueError, RuntimeError, IndexError
        As for `plan_send_kvcache`, and for the heads as for `slice_heads`.

    Examples
    --------
    A page has two tokens of two heads of 8 bytes. The second head goes to rank 1 of 2:

    >>> from cpattn.transfer.sglang_0_5_23 import KVArgs
    >>> args = KVArgs(engine_rank=0, page_size=2, kv_head_num=2,
    ...               kv_data_ptrs=[1000, 2000], kv_item_lens=[32, 32])
    >>> plan = plan_send_kvcache_slice(args, [5000, 6000], [1], [2], dst_tp_rank=1,
    ...                                dst_attn_tp_size=2, dst_kv_item_len=16, attn_tp_size=1)
    >>> plan.src_addrs.tolist(), plan.dst_addrs.tolist(), set(plan.lengths.tolist())
    ([1040, 1056, 2040, 2056], [5032, 5040, 6032, 6040], {8})
    """
    function = "plan_send_kvcache_slice"
    attn_tp_size = at_least(1, attn_tp_size, function, "attn_tp_size")
    dst_attn_tp_size = at_least(1, dst_attn_tp_size, function, "dst_attn_tp_size")
    dst_tp_rank = integer(dst_tp_rank, function, "dst_tp_rank")
    engine_rank, page_size = part(kv_args, ("engine_rank", "page_size"), function, "kv_args")
    engine_rank = integer(engine_rank, function, "engine_rank")
    compat = flag(compat, function, "compat")
    total_kv_heads = getattr(kv_args, "total_kv_head_num", None)
    if total_kv_heads is None or integer(total_kv_heads, function, "total_kv_head_num") <= 0:
        own_heads = part(kv_args, "kv_head_num", function, "kv_args")
        total_kv_heads = integer(own_heads, function, "kv_head_num") * attn_tp_size
    heads = slice_heads(
        total_kv_heads, prefill_tp_size=attn_tp_size, prefill_rank=engine_rank % attn_tp_size,
        decode_tp_size=dst_attn_tp_size, decode_rank=dst_tp_rank % dst_attn_tp_size, compat=compat,
    )  # fmt: skip
    lists = kv_buffers(function, kv_args, dst_ptrs, [dst_kv_item_len], dst_layer_ids)
    has_ids = has_layer_ids(lists)
    pp_size = integer(pp_size, function, "pp_size")
    stages = max(pp_size, 2) if compat and not has_ids else pp_size
    return _core.plan_send_kvcache_slice(
        lists, src_pages, dst_pages, page_size, heads,
        stage_fields(function, kv_args, is_last_rank, stages, False, has_ids), compat,
    )  # fmt: skip


def kv_buffers(
    function: str,
    kv_args: Any,
    dst_ptrs: Sequence[int],
    dst_item_lens: Lengths,
    dst_layer_ids: Indices | None,
) -> tuple[Any, ...]:
    """Return the buffer lists for a plan."""
    ptrs, item_lens = part(kv_args, ("kv_data_ptrs", "kv_item_lens"), function, "kv_args")
    src_layer_ids = None if dst_layer_ids is None else getattr(kv_args, "kv_layer_ids", None)
    return (
        ptrs,
        getattr(kv_args, "kv_data_lens", None),
        item_lens,
        dst_ptrs,
        dst_item_lens,
        as_now(src_layer_ids, function, "kv_layer_ids"),
        as_now(dst_layer_ids, function, "dst_layer_ids"),
    )


def as_now(indices: Any, function: str, argument: str) -> list[int]:
    """Return a copy of indices, as a list may change between check and sending."""
    return [] if indices is None else _core.ints(indices, function, argument)


def has_layer_ids(lists: tuple[Any, ...]) -> bool:
    """Tell whether a side of `kv_buffers` gives the layers of its entries."""
    return bool(lists[-2] or lists[-1])


def stage_fields(
    function: str, kv_args: Any, is_last_rank: bool, pp_size: int, is_mla: bool, has_ids: bool
) -> tuple[Any, ...]:
    """Return the sender's place in the model, with defaults for absent attributes.

    The first layer of a stage without layer ids has no default: 0 would send it to another stage's
    buffers.
    """
    pp_size = integer(pp_size, function, "pp_size")
    groups = getattr(kv_args, "kv_buf_groups", None)
    total_layers = getattr(kv_args, "total_kv_layers", None)
    draft_layers = getattr(kv_args, "draft_kv_layers", None)
    return (
        part(kv_args, "prefill_start_layer", function, "kv_args")
        if pp_size > 1 and not has_ids
        else 0,
        1 if groups is None else groups,
        0 if total_layers is None else total_layers,
        getattr(kv_args, "hidden_kv_layers", None),
        0 if draft_layers is None else draft_layers,
        is_last_rank,
        pp_size,
        is_mla,
        getattr(kv_args, "prefill_end_layer", None),
    )
