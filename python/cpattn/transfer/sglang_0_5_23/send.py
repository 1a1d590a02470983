# SPDX-License-Identifier: Apache-2.0
"""Plans of the senders of sglang 0.5.23: their lists in, the blocks they would send out.

Functions check what lists can tell and raise ValueError: entries that do not match, items outside
their buffer, negative indices. With ``compat=True`` they plan what sglang would send, right or
wrong, unchecked; where it runs off the end of a list it is IndexError. Plans that know by
themselves which layer and kind a buffer holds are made by `cpattn.transfer.plan_kv_transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import _core
from ..._arguments import at_least, flag, integer, items, part
from ..._types import Indices
from ..plan import TransferPlan

__all__ = [
    "HeadSlice",
    "plan_send_aux",
    "plan_send_kvcache",
    "plan_send_kvcache_slice",
    "plan_send_state",
    "slice_heads",
]

Lengths = Sequence[int] | None
PAGED_STATES = ("swa", "nsa", "dsa")


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
    compat: bool = False,
) -> TransferPlan:
    """The blocks of whole pages that a prefill stage sends to a decode server.

    With one stage, entries pair by position and a draft tail of the destination is left alone;
    with more as `get_mla_kv_ptrs_with_pp` and `get_mha_kv_ptrs_with_pp` say.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``kv_data_ptrs`` and ``kv_item_lens``; with several stages ``prefill_start_layer``; and
        where they are set ``kv_data_lens``, ``prefill_end_layer``, ``kv_buf_groups``,
        ``total_kv_layers``, ``hidden_kv_layers`` and ``draft_kv_layers``.
    dst_ptrs : list of int
        The destination's ``kv_data_ptrs``.
    src_pages, dst_pages : int32 or int64, shape [num_pages]
        Page ``src_pages[i]`` becomes page ``dst_pages[i]``. If either is empty so is the plan.
    pp_size : int
        Pipeline stages of the prefill.
    is_mla : bool
    is_last_rank : bool, optional
        Whether this is the last stage, the one that has the drafts.
    dst_item_lens : list of int, optional
        The destination's ``kv_item_lens``, to be compared with the source's.
    compat : bool, optional

    Returns
    -------
    TransferPlan
        One block per entry and run of pages, in the order of ``kv_data_ptrs``.

    Examples
    --------
    >>> from cpattn.transfer import KVArgs
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
    return _core.plan_send_kvcache(
        kv_buffers(function, kv_args, dst_ptrs, dst_item_lens),
        src_pages,
        dst_pages,
        stage_fields(function, kv_args, is_last_rank, pp_size, is_mla),
        compat,
    )


class HeadSlice(NamedTuple):
    """Heads of a page that one rank sends to another."""

    src_start: int  # the first of them within the source's page
    dst_start: int  # and within the destination's
    num_heads: int
    src_heads: int  # of all heads of the source's page
    dst_heads: int


HeadSlice.__module__ = "cpattn.transfer"


def slice_heads(
    total_kv_heads: int,
    *,
    prefill_tp_size: int,
    prefill_rank: int,
    decode_tp_size: int,
    decode_rank: int,
    compat: bool = False,
) -> HeadSlice:
    """Heads of a page that a prefill rank sends to a decode rank of another tensor-parallel size.

    Ranks have equal shares of the heads in order; with more ranks than heads, neighbours have the
    same head.

    Parameters
    ----------
    total_kv_heads : int
        Of the whole model.
    prefill_tp_size, prefill_rank, decode_tp_size, decode_rank : int
        Within the attention groups. ValueError unless one size divides the other, heads divide
        evenly, and the two ranks have heads in common.
    compat : bool, optional
        Do not ask.

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
    compat: bool = False,
) -> TransferPlan:
    """The blocks of K and V that go to a rank with other heads; MLA never needs it.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``engine_rank``, ``page_size``, ``kv_head_num`` or ``total_kv_head_num``, and those of
        `plan_send_kvcache`. All ``kv_item_lens`` are equal.
    dst_ptrs, src_pages, dst_pages, pp_size, is_last_rank
        As of `plan_send_kvcache`.
    dst_tp_rank, dst_attn_tp_size : int
        The destination's rank and the size of its attention group.
    dst_kv_item_len : int
        Bytes of a page of the destination.
    attn_tp_size : int
        Size of the source's attention group.
    compat : bool, optional
        As engines with layers do it: with one stage as well `get_mha_kv_ptrs_with_pp` decides.

    Returns
    -------
    TransferPlan
        A block per entry, page and token, those of whole runs joined where all heads of both
        sides go.
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
        total_kv_heads,
        prefill_tp_size=attn_tp_size,
        prefill_rank=engine_rank % attn_tp_size,
        decode_tp_size=dst_attn_tp_size,
        decode_rank=dst_tp_rank % dst_attn_tp_size,
        compat=compat,
    )
    pp_size = integer(pp_size, function, "pp_size")
    stages = max(pp_size, 2) if compat else pp_size
    return _core.plan_send_kvcache_slice(
        kv_buffers(function, kv_args, dst_ptrs, [dst_kv_item_len]),
        src_pages,
        dst_pages,
        page_size,
        heads,
        stage_fields(function, kv_args, is_last_rank, stages, False),
        compat,
    )


def plan_send_aux(
    kv_args: Any,
    dst_aux_ptrs: Sequence[int],
    src_aux_index: int,
    dst_aux_index: int,
    *,
    dst_item_lens: Lengths = None,
    compat: bool = False,
) -> TransferPlan:
    """The blocks of a request's metadata, sent after its KV cache and its states.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``aux_data_ptrs``, ``aux_item_lens`` and, where it is set, ``aux_data_lens``.
    dst_aux_ptrs : list of int
        The destination's ``aux_data_ptrs``: as many as the source's, else ValueError (compat:
        the shorter list counts).
    src_aux_index, dst_aux_index : int
        The request's slot on each side.
    dst_item_lens : list of int, optional
        The destination's ``aux_item_lens``, to be compared with the source's.
    compat : bool, optional

    Returns
    -------
    TransferPlan
        A block per buffer.
    """
    ptrs, item_lens = part(kv_args, ("aux_data_ptrs", "aux_item_lens"), "plan_send_aux", "kv_args")
    data_lens = getattr(kv_args, "aux_data_lens", None)
    buffers = (ptrs, data_lens, item_lens, dst_aux_ptrs, dst_item_lens)
    return _core.plan_send_aux(buffers, src_aux_index, dst_aux_index, compat)


def plan_send_state(
    kv_args: Any,
    dst_state_ptrs: Sequence[Sequence[int]],
    src_state_indices: Sequence[Indices | None],
    dst_state_indices: Sequence[Indices | None],
    *,
    is_mla: bool = False,
    attn_tp_size: int = 1,
    dst_attn_tp_size: int = 1,
    compat: bool = False,
) -> TransferPlan:
    """The blocks of all components of a request's state, one component after the other.

    Components of kind "mamba" have one slot on each side; others ("swa", "nsa", "dsa") pages.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``state_types``, ``state_data_ptrs``, ``state_item_lens`` and, where it is set,
        ``state_data_lens``: a list per component.
    dst_state_ptrs : list of lists of int
        The destination's ``state_data_ptrs``.
    src_state_indices, dst_state_indices : list of index lists, or of None
        Per component, equally many on both sides, else ValueError. Compat: a missing list is an
        empty one, and the longer one is cut.
    is_mla : bool, optional
    attn_tp_size, dst_attn_tp_size : int, optional
        Sizes of the attention groups. States of unequal ones are RuntimeError, except pages of
        MLA, which all ranks have.
    compat : bool, optional
    """
    function = "plan_send_state"
    compat = flag(compat, function, "compat")
    is_mla = flag(is_mla, function, "is_mla")
    attn_tp_size = integer(attn_tp_size, function, "attn_tp_size")
    dst_attn_tp_size = integer(dst_attn_tp_size, function, "dst_attn_tp_size")
    types, ptrs, item_lens = part(
        kv_args, ("state_types", "state_data_ptrs", "state_item_lens"), function, "kv_args"
    )
    kinds = [
        str(getattr(kind, "value", kind)).lower() for kind in items(types, function, "state_types")
    ]
    data_lens = getattr(kv_args, "state_data_lens", None)
    if data_lens is None or not items(data_lens, function, "state_data_lens"):
        data_lens = [None] * len(kinds)
    lists = {
        "state_types": kinds,
        "state_data_ptrs": ptrs,
        "state_data_lens": data_lens,
        "state_item_lens": item_lens,
        "dst_state_ptrs": dst_state_ptrs,
        "src_state_indices": src_state_indices,
        "dst_state_indices": dst_state_indices,
    }
    lists = {name: items(parts, function, name) for name, parts in lists.items()}  # as they are now
    num_parts = {name: len(parts) for name, parts in lists.items()}
    if len(set(num_parts.values())) > 1 and not compat:
        raise ValueError(f"plan_send_state: components must be as many in all of {num_parts}")
    components = []
    for kind, ptrs, lens, item_lens, dst_ptrs, src, dst in zip(*lists.values(), strict=False):
        src, dst = as_now(src, "src_state_indices"), as_now(dst, "dst_state_indices")
        if attn_tp_size != dst_attn_tp_size and not (is_mla and kind in PAGED_STATES):
            raise RuntimeError(
                f"plan_send_state: {kind} states need equal tensor parallelism on both sides, "
                f"got {attn_tp_size} and {dst_attn_tp_size}"
            )
        if kind == "mamba" and not len(src) == len(dst) <= 1 and not compat:
            raise ValueError(
                f"plan_send_state: mamba states have one slot on each side, got {len(src)} of the "
                f"source and {len(dst)} of the destination"
            )
        components.append(((ptrs, lens, item_lens, dst_ptrs, None), src, dst))
    return _core.plan_send_state(components, compat)


def as_now(indices: Any, argument: str) -> list[int]:
    """What is checked and then sent: a list may change in between."""
    return [] if indices is None else _core.ints(indices, "plan_send_state", argument)


def kv_buffers(
    function: str, kv_args: Any, dst_ptrs: Sequence[int], dst_item_lens: Lengths
) -> tuple[Any, ...]:
    """The lists that plans of KV read."""
    ptrs, item_lens = part(kv_args, ("kv_data_ptrs", "kv_item_lens"), function, "kv_args")
    return ptrs, getattr(kv_args, "kv_data_lens", None), item_lens, dst_ptrs, dst_item_lens


def stage_fields(
    function: str, kv_args: Any, is_last_rank: bool, pp_size: int, is_mla: bool
) -> tuple[Any, ...]:
    """The sender's place in the model, absent attributes filled in.

    Only the first layer of a stage cannot be: 0 would send it to another's buffers.
    """
    pp_size = integer(pp_size, function, "pp_size")
    groups = getattr(kv_args, "kv_buf_groups", None)
    total_layers = getattr(kv_args, "total_kv_layers", None)
    draft_layers = getattr(kv_args, "draft_kv_layers", None)
    return (
        part(kv_args, "prefill_start_layer", function, "kv_args") if pp_size > 1 else 0,
        1 if groups is None else groups,
        0 if total_layers is None else total_layers,
        getattr(kv_args, "hidden_kv_layers", None),
        0 if draft_layers is None else draft_layers,
        is_last_rank,
        pp_size,
        is_mla,
        getattr(kv_args, "prefill_end_layer", None),
    )
