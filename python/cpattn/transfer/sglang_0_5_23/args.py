# SPDX-License-Identifier: Apache-2.0
"""`KVArgs`: buffers of a server of sglang 0.5.23, as transfer planners see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..._arguments import has, integer, items, part, shown_list


class KVArgs(SimpleNamespace):
    """Buffers and ranks of a server: a set of attributes that engines fill in.

    Attributes that were not set are absent, except those below with a default value. Lists are
    parallel, with an entry per registered buffer.

    Attributes
    ----------
    engine_rank : int
        Tensor-parallel rank.
    kv_data_ptrs, kv_data_lens, kv_item_lens : list of int
        Address, bytes, and bytes of a page of each KV buffer.
    aux_data_ptrs, aux_data_lens, aux_item_lens : list of int
        Buffers of metadata, with an item for each request.
    state_types : list of str
        Kinds of state components: "mamba", "swa", "dsa", ...
    state_data_ptrs, state_data_lens, state_item_lens : list of lists of int
        State buffers of each component.
    kv_head_num, total_kv_head_num : int
        Heads of this rank, and of the model; not with MLA.
    page_size : int
    pp_rank, prefill_start_layer, prefill_end_layer : int
        Pipeline stage, and its layers with an exclusive end.
    kv_buf_groups, total_kv_layers, hidden_kv_layers, draft_kv_layers : int
        Counts as set by `setup_state_kv_args`.
    swa_page_size, mla_compression_ratios : None
    dcp_size, dcp_rank : int, 1 and 0

    Examples
    --------
    >>> args = KVArgs(page_size=64, kv_data_ptrs=list(range(122)))
    >>> args.engine_rank = 3
    >>> args
    KVArgs(page_size=64, kv_data_ptrs=[0, 1, 2, 3, ... 122 in all], engine_rank=3)
    >>> hasattr(args, "kv_buf_groups"), args.dcp_size
    (False, 1)
    """

    swa_page_size: int | None = None
    mla_compression_ratios: list[int] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0

    def __repr__(self) -> str:
        fields = (f"{name}={shown_list(value)}" for name, value in vars(self).items())
        return f"KVArgs({', '.join(fields)})"


KVArgs.__module__ = "cpattn.transfer.sglang_0_5_23"


def fill_kv_args(
    kv_args: Any, pool: Any, draft_pool: Any = None, *, total_kv_layers: int | None = None
) -> None:
    """Describe the buffers of a KV pool in `kv_args`, followed by those of a draft pool.

    The call sets ``kv_data_ptrs``, ``kv_data_lens`` and ``kv_item_lens``; ``page_size``,
    ``prefill_start_layer`` and ``prefill_end_layer`` of the pool; and ``total_kv_layers`` if given.
    Without the last, strict planners refuse K and V of a stage for a larger destination.

    Parameters
    ----------
    kv_args : KVArgs, or any object that takes attributes
        Changed in place.
    pool, draft_pool : MHATokenToKVPool, MLATokenToKVPool, or alike
        Pools with ``get_contiguous_buf_infos()``, ``page_size``, ``start_layer`` and ``layer_num``.
    total_kv_layers : int, optional
        Layers of the whole model without drafts.

    Raises
    ------
    TypeError
        If a pool lacks an attribute, a number is no integer, or `kv_args` does not take attributes.

    Examples
    --------
    A stage with layers 4 and 5, keys and values of each:

    >>> import cpattn
    >>> pool = cpattn.kv.MHATokenToKVPool(
    ...     size=64, page_size=16, num_layers=2, num_kv_heads=2, head_dim=32, start_layer=4)
    >>> args = KVArgs()
    >>> fill_kv_args(args, pool, total_kv_layers=8)
    >>> len(args.kv_data_ptrs), args.kv_item_lens     # 16 tokens of 2 heads of 32 bfloat16
    (4, [2048, 2048, 2048, 2048])
    >>> args.prefill_start_layer, args.prefill_end_layer
    (4, 6)
    """
    function = "fill_kv_args"
    names = ("get_contiguous_buf_infos", "page_size", "start_layer", "layer_num")
    buf_infos, page_size, start_layer, num_layers = part(pool, names, function, "pool")
    infos = items(buf_infos(), function, "pool")
    drafts: tuple[Any, ...] = ((), (), ())
    if draft_pool is not None:
        buf_infos = part(draft_pool, names[0], function, "draft_pool")
        drafts = items(buf_infos(), function, "draft_pool")
    keys = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
    fields: dict[str, Any] = {
        key: [*own, *draft] for key, own, draft in zip(keys, infos, drafts, strict=True)
    }
    fields["page_size"] = page_size
    fields["prefill_start_layer"] = start_layer
    fields["prefill_end_layer"] = start_layer + num_layers
    if total_kv_layers is not None:
        fields["total_kv_layers"] = integer(total_kv_layers, function, "total_kv_layers")
    _set(kv_args, fields, function)


def _set(kv_args: Any, fields: dict[str, Any], function: str) -> None:
    """Set attributes; TypeError if an object does not take them."""
    for name, value in fields.items():
        try:
            setattr(kv_args, name, value)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"{function}: kv_args must take attributes, got {type(kv_args).__name__}"
            ) from error


def setup_state_kv_args(
    kv_args: Any, pool: Any, draft_pool: Any = None, total_kv_layers: int = 0
) -> None:
    """Describe the grouping of an MLA pool's KV buffers, and reset the lists of state.

    All lists of state become empty: index keys go with the KV buffers. If the pool has
    ``get_state_buf_infos``, as MLA pools do and MHA pools do not, the call also sets::

        kv_buf_groups = 2 if pool.index_head_dim is None else 3
        hidden_kv_layers = total_kv_layers
        draft_kv_layers = draft_pool.layer_num if there is one else 0

    so that a draft on a thin stage does not count as a group.

    Parameters
    ----------
    kv_args : KVArgs, or any object that takes attributes
        Changed in place.
    pool, draft_pool : MLATokenToKVPool, MHATokenToKVPool, or alike
        Pool of the model, and of its draft model if there is one.
    total_kv_layers : int, optional
        Layers of the whole model without drafts.

    Raises
    ------
    TypeError
        If a draft pool lacks ``layer_num``, a number is no integer, or `kv_args` does not take
        attributes.

    Examples
    --------
    >>> from types import SimpleNamespace as Pool
    >>> args = KVArgs()
    >>> pool = Pool(index_head_dim=128, get_state_buf_infos=lambda: ([], [], []))
    >>> setup_state_kv_args(args, pool, Pool(layer_num=1), total_kv_layers=61)
    >>> args.kv_buf_groups, args.hidden_kv_layers, args.draft_kv_layers
    (3, 61, 1)
    """
    function = "setup_state_kv_args"
    total_kv_layers = integer(total_kv_layers, function, "total_kv_layers")
    parts = ("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor")
    fields: dict[str, Any] = {f"state_{name}": [] for name in parts}
    if has(pool, "get_state_buf_infos"):
        fields["kv_buf_groups"] = 2 if getattr(pool, "index_head_dim", None) is None else 3
        fields["hidden_kv_layers"] = fields["total_kv_layers"] = total_kv_layers
        fields["draft_kv_layers"] = 0
        if draft_pool is not None:
            fields["draft_kv_layers"] = part(draft_pool, "layer_num", function, "draft_pool")
    _set(kv_args, fields, function)
