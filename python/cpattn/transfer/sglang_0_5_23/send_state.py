# SPDX-License-Identifier: Apache-2.0
"""Plans of what follows the KV cache: a request's states and its metadata, as sglang 0.5.23 does.

The rules for errors and ``compat`` are those of ``send``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import _core
from ..._arguments import flag, integer, items, part
from ..._types import Indices
from ..plan import TransferPlan
from .send import Lengths

__all__ = ["plan_send_aux", "plan_send_state"]

PAGED_STATES = ("swa", "nsa", "dsa")


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
        The destination's ``aux_data_ptrs``: as many as the source's (compat: the shorter list
        counts).
    src_aux_index, dst_aux_index : int
        The request's slot on each side.
    dst_item_lens : list of int, optional
        The destination's ``aux_item_lens``, to be compared with the source's.
    compat : bool, optional
        As sglang 0.5.23 does it, unchecked.

    Returns
    -------
    TransferPlan
        A block per buffer.

    Raises
    ------
    TypeError
        For missing attributes, and arguments of another type than stated.
    ValueError
        For unequally many buffers, other item lengths, and slots that are negative or outside
        their buffer.
    IndexError
        With compat, where sglang runs off the end of a list.

    Examples
    --------
    >>> from cpattn.transfer import KVArgs
    >>> args = KVArgs(aux_data_ptrs=[100, 200], aux_item_lens=[8, 16])
    >>> plan = plan_send_aux(args, [500, 600], src_aux_index=2, dst_aux_index=1)
    >>> plan.src_addrs.tolist(), plan.dst_addrs.tolist(), plan.lengths.tolist()
    ([116, 232], [508, 616], [8, 16])
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
    """Plan the blocks of all components of a request's state, one component after the other.

    Components of kind "mamba" have one slot on each side; others ("swa", "nsa", "dsa") pages.

    Parameters
    ----------
    kv_args : KVArgs, or any object with these attributes
        ``state_types``, ``state_data_ptrs``, ``state_item_lens`` and, where it is set,
        ``state_data_lens``: a list per component.
    dst_state_ptrs : list of lists of int
        The destination's ``state_data_ptrs``.
    src_state_indices, dst_state_indices : list of ints, or of None
        Per component, equally many on both sides; None is no index. Compat: a missing list is an
        empty one, and the longer one is cut.
    is_mla : bool, optional
        Whether all ranks hold the same latent.
    attn_tp_size, dst_attn_tp_size : int, optional
        Sizes of the attention groups.
    compat : bool, optional
        As sglang 0.5.23 does it, unchecked.

    Returns
    -------
    TransferPlan
        A block per component, buffer and run of indices.

    Raises
    ------
    TypeError
        For missing attributes, and arguments of another type than stated.
    ValueError
        For lists of unequally many components or indices, indices that are negative or outside
        their buffer, and more than one slot of "mamba".
    IndexError
        With compat, where sglang runs off the end of a list.
    RuntimeError
        For states of unequal attention groups, except pages of MLA, which all ranks have.

    Examples
    --------
    >>> from cpattn.transfer import KVArgs
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
    """Return what is checked and then sent: a list may change in between."""
    return [] if indices is None else _core.ints(indices, "plan_send_state", argument)
