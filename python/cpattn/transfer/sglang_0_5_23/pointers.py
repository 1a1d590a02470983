# SPDX-License-Identifier: Apache-2.0
"""Pairs of buffers of a prefill stage and of the decode server that receives them.

The lists that servers register have groups of layers: all K, then all V, then all index-K if there
are any, followed by the same groups for the layers of a draft model. A pipeline stage holds a range
of the model's layers; the decode server usually holds all. A destination with at least as many
layers as the model counts as one with all layers.

Functions answer correctly or raise ValueError. With ``compat=True`` they answer as sglang 0.5.23
(or an earlier release, if stated), bug for bug: slices are clipped at the end of a list, and for
some layouts the pairs are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ..._arguments import has


def get_mha_kv_ptrs_with_pp(
    src_kv_ptrs: Sequence[int],
    dst_kv_ptrs: Sequence[int],
    *,
    prefill_start_layer: int,
    total_kv_layers: int | None = 0,
    compat: bool = False,
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """List the K and V buffers that a prefill stage sends, and the buffers that receive them.

    Parameters
    ----------
    src_kv_ptrs : list of int or integer array, length 2 * n
        K and then V of layers [prefill_start_layer, prefill_start_layer + n). Elements may be any
        value per buffer: pointers, lengths.
    dst_kv_ptrs : list of int or integer array, length 2 * (total_kv_layers + drafts)
        K of the model's layers, their V, then the drafts; or the same stage as the source.
    prefill_start_layer : int
        First layer of the stage, in the model.
    total_kv_layers : int, optional
        Layers of the whole model without drafts; 0 or None if unknown. A longer destination then
        raises ValueError, as drafts look like layers.
    compat : bool, optional
        Whether to ignore `total_kv_layers` and guess drafts by a remainder, as sglang 0.5.23 does.

    Returns
    -------
    src_k, src_v, dst_k, dst_v : lists of int
    num_layers : int
        Layers of the stage.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If the lists do not have these groups, or the stage ends beyond the model.

    Examples
    --------
    The second of two stages starts after three of five layers; the decode server has a draft, too:

    >>> decode = ["K0", "K1", "K2", "K3", "K4", "V0", "V1", "V2", "V3", "V4", "dK", "dV"]
    >>> stage = ["K3", "K4", "V3", "V4"]
    >>> get_mha_kv_ptrs_with_pp(stage, decode, prefill_start_layer=3, total_kv_layers=5)[2:4]
    (['K3', 'K4'], ['V3', 'V4'])
    """
    function = "get_mha_kv_ptrs_with_pp"
    src = listed(src_kv_ptrs, function, "src_kv_ptrs")
    dst = listed(dst_kv_ptrs, function, "dst_kv_ptrs")
    (*ranges, num_layers) = _core.mha_kv_entries(
        len(src), len(dst), prefill_start_layer, 0 if total_kv_layers is None else total_kv_layers,
        compat,
    )  # fmt: skip
    src_k, src_v, dst_k, dst_v = (slice(*entries) for entries in ranges)
    return src[src_k], src[src_v], dst[dst_k], dst[dst_v], num_layers


def get_mla_kv_ptrs_with_pp(
    src_kv_ptrs: Sequence[int],
    dst_kv_ptrs: Sequence[int],
    *,
    prefill_start_layer: int,
    kv_buf_groups: int = 1,
    total_kv_layers: int | None = 0,
    hidden_kv_layers: int | None = None,
    draft_kv_layers: int = 0,
    is_last_rank: bool = False,
    num_draft_entries: int | None = None,
    compat: bool = False,
) -> tuple[list[int], list[int], int]:
    """List the buffers of a stage with several groups per layer, and the buffers that receive them.

    Parameters
    ----------
    src_kv_ptrs : list of int or integer array
        The stage's layers group by group; on the last stage then the drafts group by group.
    dst_kv_ptrs : list of int or integer array
        The model's layers group by group, then the drafts; or the same stage as the source.
    prefill_start_layer : int
        First layer of the stage, in the model.
    kv_buf_groups : int, optional
        2 for K and V, 3 with index-K.
    total_kv_layers : int, optional
        Layers of the whole model without drafts, 0 or None if unknown. It selects the rule of
        sglang up to 0.5.19 (#23893), which knows no drafts at the source.
    hidden_kv_layers : int, optional
        The same number. It selects the rule of sglang 0.5.20 to 0.5.23, which knows such drafts.
    draft_kv_layers : int, optional
        Draft layers of the last stage.
    is_last_rank : bool, optional
        Whether the source is the last stage.
    num_draft_entries : int, optional
        Number of drafts at the end of `src_kv_ptrs`. It selects the rule for lists with one entry
        per layer (engines other than Ascend's), with one group and the same drafts on both sides.
    compat : bool, optional
        Whether to follow exactly one of these rules, with clipped slices. With the last rule,
        drafts take the end of a list even if it has target layers or more drafts.

    Returns
    -------
    src : list of int
        All of `src_kv_ptrs`.
    dst : list of int
        Destination pointers in the same order, equally many (compat: any number).
    num_entries : int
        ``len(src)``.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If the lists do not have these groups, the stage ends beyond the model, or a required number
        of layers is missing.

    Examples
    --------
    >>> decode = ["K0", "K1", "K2", "V0", "V1", "V2", "dK", "dV"]
    >>> stage = ["K2", "V2", "dK", "dV"]
    >>> get_mla_kv_ptrs_with_pp(stage, decode, prefill_start_layer=2, kv_buf_groups=2,
    ...                         hidden_kv_layers=3, draft_kv_layers=1, is_last_rank=True)[1]
    ['K2', 'V2', 'dK', 'dV']
    """
    function = "get_mla_kv_ptrs_with_pp"
    src = listed(src_kv_ptrs, function, "src_kv_ptrs")
    dst = listed(dst_kv_ptrs, function, "dst_kv_ptrs")
    ranges = _core.mla_kv_entries(
        len(src), len(dst), prefill_start_layer, kv_buf_groups,
        0 if total_kv_layers is None else total_kv_layers, hidden_kv_layers, draft_kv_layers,
        is_last_rank, num_draft_entries, compat,
    )  # fmt: skip
    return src, [ptr for entries in ranges for ptr in dst[slice(*entries)]], len(src)


def listed(ptrs: Any, function: str, argument: str) -> list[Any]:
    """Return a new list, with plain ints from an array."""
    plain = isinstance(ptrs, (list, tuple))
    array = has(ptrs, "tolist") and not isinstance(ptrs, (memoryview, np.ma.MaskedArray))
    try:
        values = list(ptrs) if plain else ptrs.tolist() if array else None
    except Exception:  # such as a tensor without accessible elements
        values = None
    if not isinstance(values, list):
        raise TypeError(
            f"{function}: {argument} must be a list, a tuple or an array of one dimension, got "
            f"{type(ptrs).__name__}"
        )
    return values


def build_transfer_entry_pairs(
    src_layer_ids: Any,
    dst_layer_ids: Any,
    n_src: int,
    n_dst: int,
    allow_positional_fallback: bool = False,
) -> list[tuple[int, int]]:
    """Pair entries that hold the same layer.

    Parameters
    ----------
    src_layer_ids, dst_layer_ids : list of int, or None
        Global layer id of every entry; None or empty if the side gives none. Equal ids, one per
        group, pair in order of occurrence.
    n_src, n_dst : int
        Number of entries of each side.
    allow_positional_fallback : bool, optional
        Whether the destination may have more entries than the source if there are no ids; and
        whether entries pair by position if only one side has ids.

    Returns
    -------
    list of (source entry, destination entry)

    Raises
    ------
    RuntimeError
        If the sides cannot be paired; sglang raises it, too.
    TypeError
        If an argument is of another type than stated.
    ValueError
        If a number of entries is negative.

    Examples
    --------
    >>> build_transfer_entry_pairs([3, 7, 3, 7], [3, 7, 11, 3, 7, 11], 4, 6)
    [(0, 0), (1, 1), (2, 3), (3, 4)]
    """
    return _core.build_transfer_entry_pairs(
        src_layer_ids, dst_layer_ids, n_src, n_dst, allow_positional_fallback
    )


def kv_start_layer(start_layer: int, kv_layer_ids: Any) -> int:
    """Return a stage's ``prefill_start_layer`` among the layers with a KV cache.

    Parameters
    ----------
    start_layer : int
        First layer of the stage, in the model.
    kv_layer_ids : list of int
        Ascending ids of the layers with a KV cache.

    Returns
    -------
    int
        Number of layers with a KV cache before the stage.

    Raises
    ------
    TypeError, ValueError
        If a number is no integer, the layer is negative, or ids do not ascend.

    Examples
    --------
    Every fourth of 60 layers has full attention:

    >>> kv_start_layer(30, list(range(3, 60, 4)))
    7
    """
    return _core.kv_start_layer(start_layer, kv_layer_ids)


class DecodeTargets(NamedTuple):
    """Prefill ranks that a decode rank contacts.

    Attributes
    ----------
    ranks : range
        Ranks that send the KV cache.
    dummy_ranks : range
        Ranks that only learn that they have nothing to send.
    required_dst_info_num : int
        Number of decode ranks that each of `ranks` waits for.

    Examples
    --------
    Decode has half as many ranks, so each takes its heads from two:

    >>> decode_targets(1, prefill_tp_size=4, decode_tp_size=2, is_mla=False)
    DecodeTargets(ranks=range(2, 4), dummy_ranks=range(4, 4), required_dst_info_num=1)
    """

    ranks: range
    dummy_ranks: range
    required_dst_info_num: int


DecodeTargets.__module__ = "cpattn.transfer.sglang_0_5_23"


def decode_targets(
    engine_rank: int, *, prefill_tp_size: int, decode_tp_size: int, is_mla: bool
) -> DecodeTargets:
    """Find the prefill ranks that serve a decode rank, both numbered within their attention group.

    Equal sizes pair one to one. Otherwise several decode ranks share a prefill rank, or a decode
    rank takes its heads from several prefill ranks; with MLA, where all of them hold the same, only
    the first sends.

    Parameters
    ----------
    engine_rank : int
        Rank in the decode server; modulo `decode_tp_size`, the rank in the attention group.
    prefill_tp_size, decode_tp_size : int
        Sizes of the attention groups; one must divide the other.
    is_mla : bool
        Whether all ranks hold the same latent.

    Returns
    -------
    DecodeTargets

    Raises
    ------
    TypeError, ValueError
        If a number is no integer, `is_mla` is no bool, a rank is negative, or neither size divides
        the other.

    Examples
    --------
    >>> decode_targets(3, prefill_tp_size=8, decode_tp_size=4, is_mla=True)
    DecodeTargets(ranks=range(6, 7), dummy_ranks=range(7, 8), required_dst_info_num=1)
    """
    begin, end, num_real, required = _core.decode_targets(
        engine_rank, prefill_tp_size, decode_tp_size, is_mla
    )
    return DecodeTargets(range(begin, begin + num_real), range(begin + num_real, end), required)
