# SPDX-License-Identifier: Apache-2.0
"""Pairs of buffers: those of a prefill stage, and those of the decode server for them.

The lists that servers register hold groups of layers: all K, then all V, then all index-K if there
are any, and behind them the same for the layers of a draft model. A pipeline stage holds a range
of the model's layers, the decode server usually all of them. A destination with at least as many
layers as the model is taken for that.

Functions answer right or raise ValueError. With ``compat=True`` they answer as sglang 0.5.23 does
(where they say so, an earlier release), bug for bug: slices are clipped at the end of a list, and
for some layouts the wrong buffers come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import _core
from ..._arguments import has

__all__ = [
    "DecodeTargets",
    "build_transfer_entry_pairs",
    "decode_targets",
    "get_mha_kv_ptrs_with_pp",
    "get_mla_kv_ptrs_with_pp",
    "kv_start_layer",
]


def get_mha_kv_ptrs_with_pp(
    src_kv_ptrs: Sequence[int],
    dst_kv_ptrs: Sequence[int],
    *,
    prefill_start_layer: int,
    total_kv_layers: int | None = 0,
    compat: bool = False,
) -> tuple[list[int], list[int], list[int], list[int], int]:
    """List the buffers of K and V that a prefill stage sends, and those that receive them.

    Parameters
    ----------
    src_kv_ptrs : list of int or integer array, length 2 * n
        K and then V of layers [prefill_start_layer, prefill_start_layer + n). Anything that
        belongs to a buffer will do: pointers, lengths.
    dst_kv_ptrs : list of int or integer array, length 2 * (total_kv_layers + drafts)
        K of the model's layers, V of them, then the drafts; or the same stage as the source.
    prefill_start_layer : int
        The first layer of the stage, in the model.
    total_kv_layers : int, optional
        Layers of the whole model without drafts. 0 or None for unknown; a longer destination is
        ValueError then, because its drafts cannot be told from layers.
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
        For lists that are no such groups, and a stage that ends behind the model.

    Examples
    --------
    The second of two stages, three of five layers before it; the decode server has a draft, too:

    >>> decode = ["K0", "K1", "K2", "K3", "K4", "V0", "V1", "V2", "V3", "V4", "dK", "dV"]
    >>> stage = ["K3", "K4", "V3", "V4"]
    >>> get_mha_kv_ptrs_with_pp(stage, decode, prefill_start_layer=3, total_kv_layers=5)[2:4]
    (['K3', 'K4'], ['V3', 'V4'])
    """
    function = "get_mha_kv_ptrs_with_pp"
    src = listed(src_kv_ptrs, function, "src_kv_ptrs")
    dst = listed(dst_kv_ptrs, function, "dst_kv_ptrs")
    (*ranges, num_layers) = _core.mha_kv_entries(
        len(src),
        len(dst),
        prefill_start_layer,
        0 if total_kv_layers is None else total_kv_layers,
        compat,
    )
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
    """List the buffers of a stage with several groups per layer, and those that receive them.

    Parameters
    ----------
    src_kv_ptrs : list of int or integer array
        Per group the stage's layers; on the last stage then per group the drafts.
    dst_kv_ptrs : list of int or integer array
        Per group the model's layers, then per group the drafts; or the same stage as the source.
    prefill_start_layer : int
        The first layer of the stage, in the model.
    kv_buf_groups : int, optional
        2 for K and V, 3 with index-K.
    total_kv_layers : int, optional
        Layers of the whole model without drafts, 0 or None for unknown. The rule of sglang up to
        0.5.19 (#23893), which knows no drafts at the source.
    hidden_kv_layers : int, optional
        The same number; given, it selects the rule of sglang 0.5.20 to 0.5.23, which does.
    draft_kv_layers : int, optional
        Draft layers of the last stage.
    is_last_rank : bool, optional
        Whether the source is the last stage.
    num_draft_entries : int, optional
        Drafts at the end of `src_kv_ptrs`; given, it selects the rule of lists with one entry for
        each layer (engines other than Ascend's), with one group and no other number of drafts.
    compat : bool, optional
        Exactly one of these three rules, clipped slices included. By the last, drafts take the end
        of a list even where that holds target layers, or more drafts.

    Returns
    -------
    src : list of int
        All of `src_kv_ptrs`.
    dst : list of int
        Pointers in the same order, as many (compat: any number).
    num_entries : int
        ``len(src)``.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        For lists that are no such groups, a stage that ends behind the model, and a number of
        layers that is needed and not given.

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
        len(src),
        len(dst),
        prefill_start_layer,
        kv_buf_groups,
        0 if total_kv_layers is None else total_kv_layers,
        hidden_kv_layers,
        draft_kv_layers,
        is_last_rank,
        num_draft_entries,
        compat,
    )
    return src, [ptr for entries in ranges for ptr in dst[slice(*entries)]], len(src)


def listed(ptrs: Any, function: str, argument: str) -> list[Any]:
    """Return a new list; of plain ints from an array."""
    plain = isinstance(ptrs, (list, tuple))
    array = has(ptrs, "tolist") and not isinstance(ptrs, (memoryview, np.ma.MaskedArray))
    try:
        values = list(ptrs) if plain else ptrs.tolist() if array else None
    except Exception:  # of a tensor without elements to look at
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
        Global layer id of every entry; None or empty if the side does not say. An id that occurs
        several times, once per group, is paired in order of occurrence.
    n_src, n_dst : int
        Entries of each side.
    allow_positional_fallback : bool, optional
        Without ids, let the destination have more entries than the source; with ids on one side
        only, pair by position.

    Returns
    -------
    list of (source entry, destination entry)

    Raises
    ------
    RuntimeError
        The sides cannot be paired; sglang raises it, too.
    TypeError
        If an argument is of another type than stated.
    ValueError
        For a negative number of entries.

    Examples
    --------
    >>> build_transfer_entry_pairs([3, 7, 3, 7], [3, 7, 11, 3, 7, 11], 4, 6)
    [(0, 0), (1, 1), (2, 3), (3, 4)]
    """
    return _core.build_transfer_entry_pairs(
        src_layer_ids, dst_layer_ids, n_src, n_dst, allow_positional_fallback
    )


def kv_start_layer(start_layer: int, kv_layer_ids: Any) -> int:
    """Count the layers with a KV cache before a stage: its ``prefill_start_layer`` among those.

    Parameters
    ----------
    start_layer : int
        The stage's first layer, in the model.
    kv_layer_ids : list of int
        Ascending ids of the layers with a KV cache.

    Returns
    -------
    int
        How many of them stand before the stage.

    Raises
    ------
    TypeError
        If a number is no integer.
    ValueError
        For a negative layer, and ids that do not ascend.

    Examples
    --------
    Every fourth of 60 layers has full attention:

    >>> kv_start_layer(30, list(range(3, 60, 4)))
    7
    """
    return _core.kv_start_layer(start_layer, kv_layer_ids)


class DecodeTargets(NamedTuple):
    """Prefill ranks a decode rank talks to.

    Attributes
    ----------
    ranks : range
        Ranks that send the KV cache.
    dummy_ranks : range
        Ranks that only learn that nothing is wanted of them.
    required_dst_info_num : int
        Decode ranks for which each of `ranks` waits.

    Examples
    --------
    Decode has half the ranks, so that each takes its heads from two:

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

    Equal sizes pair one to one. Several decode ranks share a prefill rank, or a decode rank takes
    its heads from several prefill ranks; of these only the first sends with MLA, where all hold
    the same.

    Parameters
    ----------
    engine_rank : int
        Rank in the decode server; the rank in the attention group is the remainder by
        `decode_tp_size`.
    prefill_tp_size, decode_tp_size : int
        Sizes of the attention groups, of which one divides the other.
    is_mla : bool
        Whether all ranks hold the same latent.

    Returns
    -------
    DecodeTargets

    Raises
    ------
    TypeError
        If a number is no integer, or `is_mla` no bool.
    ValueError
        For a negative rank, and sizes of which neither divides the other.

    Examples
    --------
    >>> decode_targets(3, prefill_tp_size=8, decode_tp_size=4, is_mla=True)
    DecodeTargets(ranks=range(6, 7), dummy_ranks=range(7, 8), required_dst_info_num=1)
    """
    begin, end, num_real, required = _core.decode_targets(
        engine_rank, prefill_tp_size, decode_tp_size, is_mla
    )
    return DecodeTargets(range(begin, begin + num_real), range(begin + num_real, end), required)
