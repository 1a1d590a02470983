# SPDX-License-Identifier: Apache-2.0
"""Plans of a request's states and metadata, which sglang 0.5.23 sends after the KV cache.

Errors and ``compat`` follow the rules of ``send``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _core
from ..._arguments import at_least, flag, integer, items, part
from ..._types import Indices
from ..plan import TransferPlan
from .send import Lengths, as_now
from .shards import filter_kv_indices_for_shard_rank

PAGED_STATES = ("swa", "nsa", "dsa")
INDEX_KEYS = ("nsa", "dsa")


def plan_send_aux(
    kv_args: Any,
    dst_aux_ptrs: Sequence[int],
    src_aux_index: int,
    dst_aux_index: int,
    *,
    dst_item_lens: Lengths = None,
    compat: bool = False,
) -> TransferPlan:
    """Plan the blocks of a request's metadata, sent after its KV cache and its states.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``aux_data_ptrs``, ``aux_item_lens`` and, where it is set, ``aux_data_lens``.
    dst_aux_ptrs : list of int
        The destination's ``aux_data_ptrs``, as many as the source has. With compat, lists may
        differ in length, and the plan ends with the shorter one.
    src_aux_index, dst_aux_index : int
        The request's slot on each side.
    dst_item_lens : list of int, optional
        The destination's ``aux_item_lens``, which must equal the source's.
    compat : bool, optional
        Whether to plan what sglang 0.5.23 sends, without checks.

    Returns
    -------
    TransferPlan
        A block per buffer.

    Raises
    ------
    TypeError
        If `kv_args` lacks an attribute, or an argument has another type than stated.
    ValueError
        If the sides differ in the number of buffers or in item lengths, or if a slot is negative
        or outside its buffer.
    IndexError
        With compat, if sglang would read beyond the end of a list.

    Examples
    --------
    >>> from cpattn.transfer.sglang_0_5_23 import KVArgs
    >>> args = KVArgs(aux_data_ptrs=[100, 200], aux_item_lens=[8, 16])
    >>> plan = plan_send_aux(args, [500, 600], src_aux_index=2, dst_aux_index=1)
    >>> plan.src_addrs.tolist(), plan.dst_addrs.tolist(), plan.lengths.tolist()
    ([116, 232], [508, 616], [8, 16])
    """
    ptrs, item_lens = part(kv_args, ("aux_data_ptrs", "aux_item_lens"), "plan_send_aux", "kv_args")
    data_lens = getattr(kv_args, "aux_data_lens", None)
    buffers = (ptrs, data_lens, item_lens, dst_aux_ptrs, dst_item_lens, None, None)
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
    dst_state_item_lens: Sequence[Lengths] | None = None,
    dst_state_layer_ids: Sequence[Indices | None] | None = None,
    pp_size: int = 1,
    kv_shard_rank: int = 0,
    kv_shard_size: int = 1,
    allow_dst_elision: bool | None = None,
    compat: bool = False,
) -> TransferPlan:
    """Plan the blocks that send a request's state, one component after the other.

    A component of kind "mamba" has one slot on each side; "swa", "nsa" and "dsa" have pages.

    Source and destination buffers pair by layer id, as in `build_transfer_entry_pairs`. Without
    ids, equally many buffers pair by position. A destination with the whole model has more buffers
    than a pipeline stage or layer split; index keys ("nsa", "dsa") and MLA states then pair with
    its buffers from ``prefill_start_layer`` on. Item length 0 marks a left out buffer: not sent.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``state_types``, ``state_data_ptrs``, ``state_item_lens`` and, where they are set,
        ``state_data_lens`` and ``state_layer_ids``: a list per component. If the sides differ in
        the number of buffers, also ``prefill_start_layer``; ``prefill_end_layer``, if set, checks
        the number of draft buffers behind the layers.
    dst_state_ptrs : list of lists of int
        The destination's ``state_data_ptrs``.
    src_state_indices, dst_state_indices : list of ints, or of None
        Slots or pages of each component, equally many on both sides; None stands for no index.
        With compat, a missing list counts as empty, and the longer list is cut.
    is_mla : bool, optional
        Whether all ranks hold the same latent.
    attn_tp_size, dst_attn_tp_size : int, optional
        Number of ranks in the attention group of the source and of the destination.
    dst_state_item_lens : list of lists of int, or of None, optional
        The destination's ``state_item_lens``, a length for each of its buffers.
    dst_state_layer_ids : list of lists of int, or of None, optional
        The destination's ``state_layer_ids``.
    pp_size : int, optional
        Pipeline stages of the prefill. With several stages, give ids for both sides or neither.
    kv_shard_rank, kv_shard_size : int, optional
        Rank and size of the group that stripes pages. Indices of "nsa" and "dsa" are then logical
        pages, and the rank sends those it holds. A component without such pages is not checked.
    allow_dst_elision : bool, optional
        Whether the destination may leave out buffers. Default: True for "nsa" and "dsa" only.
    compat : bool, optional
        Whether to plan what sglang 0.5.23 sends; only lengths, ids and striped pages are checked.

    Returns
    -------
    TransferPlan
        A block per component, buffer and run of indices.

    Raises
    ------
    TypeError
        If `kv_args` lacks an attribute, or an argument has another type than stated.
    ValueError
        If lists differ in the number of components or indices, an index is negative or outside its
        buffer, a "mamba" component has several slots, a buffer has no partner, or an item length
        of the destination is missing or differs from the source's.
    IndexError
        With compat, if sglang would read beyond the end of a list.
    RuntimeError
        If the attention groups differ in size, except for pages of MLA, which all ranks have; or
        if layer ids cannot be paired.

    Examples
    --------
    >>> from cpattn.transfer.sglang_0_5_23 import KVArgs
    >>> args = KVArgs(state_types=["mamba", "swa"], state_data_ptrs=[[100], [200]],
    ...               state_item_lens=[[8], [16]])
    >>> plan = plan_send_state(args, [[500], [600]], [[1], [2, 3]], [[0], [5, 6]])
    >>> plan.src_addrs.tolist(), plan.dst_addrs.tolist(), plan.lengths.tolist()
    ([108, 232], [500, 680], [8, 32])
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
    lists: dict[str, Any] = {
        "state_types": kinds,
        "state_data_ptrs": ptrs,
        "state_item_lens": item_lens,
        "dst_state_ptrs": dst_state_ptrs,
        "src_state_indices": src_state_indices,
        "dst_state_indices": dst_state_indices,
    }
    optional = {
        "state_data_lens": getattr(kv_args, "state_data_lens", None),
        "dst_state_item_lens": dst_state_item_lens,
        "state_layer_ids": getattr(kv_args, "state_layer_ids", None),
        "dst_state_layer_ids": dst_state_layer_ids,
    }
    lists = {name: items(parts, function, name) for name, parts in lists.items()}  # as they are now
    lists |= {
        name: tuple(_or_unknown(parts, len(kinds), name, compat))
        for name, parts in optional.items()
    }
    num_parts = {name: len(parts) for name, parts in lists.items()}
    if len(set(num_parts.values())) > 1 and not compat:
        raise ValueError(f"plan_send_state: components must be as many in all of {num_parts}")
    stage = (
        getattr(kv_args, "prefill_start_layer", None),
        getattr(kv_args, "prefill_end_layer", None),
        at_least(1, pp_size, function, "pp_size"),
    )
    shard_size = at_least(1, kv_shard_size, function, "kv_shard_size")
    if allow_dst_elision is not None:
        allow_dst_elision = flag(allow_dst_elision, function, "allow_dst_elision")
    components = []
    for kind, ptrs, item_lens, dst_ptrs, src, dst, lens, dst_lens, src_ids, dst_ids in zip(
        *lists.values(), strict=False
    ):
        src = as_now(src, function, "src_state_indices")
        dst = as_now(dst, function, "dst_state_indices")
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
        if kind in INDEX_KEYS and shard_size > 1:
            src, dst = _owned(src, dst, kv_shard_rank, shard_size)
            if not src:
                continue
        is_flat = kind in INDEX_KEYS or (is_mla and kind != "mamba")
        may_elide = kind in INDEX_KEYS if allow_dst_elision is None else allow_dst_elision
        src_ids = as_now(src_ids, function, "state_layer_ids")
        dst_ids = as_now(dst_ids, function, "dst_state_layer_ids")
        buffers = ptrs, lens, item_lens, dst_ptrs, dst_lens, src_ids, dst_ids
        components.append((buffers, src, dst, *stage, is_flat, may_elide))
    return _core.plan_send_state(components, compat)


def _or_unknown(lists: Any, num_components: int, argument: str, compat: bool) -> list[Any]:
    """Return a list per component; None for each component if the side gives no lists."""
    known = [] if lists is None else list(items(lists, "plan_send_state", argument))
    if known and not compat:
        return known
    absent: Any = [] if known else None  # a side that gives some lists must give all
    return known + [absent] * (num_components - len(known))


def _owned(
    src: list[int], dst: list[int], shard_rank: int, shard_size: int
) -> tuple[list[int], list[int]]:
    """Select from striped pages those of one rank, with their partners at the destination."""
    if len(src) != len(dst):
        raise ValueError(
            f"plan_send_state: striped state pages must be as many on both sides, got {len(src)} "
            f"of the source and {len(dst)} of the destination"
        )
    pages, positions = filter_kv_indices_for_shard_rank(
        kv_indices=src, index_slice=slice(0, len(src)), shard_rank=shard_rank, shard_size=shard_size
    )
    return pages.tolist(), [dst[position] for position in positions.tolist()]
