# SPDX-License-Identifier: Apache-2.0
"""Shards of a chunk, by pages or by layers, for ranks that do not send all of it.

Prefill ranks may stripe the pages of the KV cache over their group, so each holds every N-th page;
or all hold all pages and divide them for the transfer; or each keeps a range of layers. The
functions have the names and the arguments of sglang 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import _core
from ..._arguments import at_least, flag, integer, part
from ..._types import Indices
from .pages import as_listed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def filter_kv_indices_for_shard_rank(
    *, kv_indices: Indices, index_slice: slice, shard_rank: int, shard_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Select the pages of a chunk that a rank holds, if ranks stripe pages.

    Logical page ``l`` lives on rank ``l % shard_size`` as page ``l // shard_size``. The rank's
    pages are not consecutive in the transfer, so the result has positions instead of a slice.

    Parameters
    ----------
    kv_indices : ints [num_pages]
        Logical pages of the chunk.
    index_slice : slice
        Range of the pages in the transfer, equally long; start and stop are required.
    shard_rank, shard_size : int
        Rank and size of the group.

    Returns
    -------
    kv_indices : array [n], int32
        Pages of the rank's own pool, in the order given.
    positions : array [n], int64
        Places of these pages in the destination's announced list.

    Raises
    ------
    TypeError
        If a page or a number is no integer, or `index_slice` no slice with both ends.
    ValueError
        If a page is negative, pages and slice differ in length, a rank is outside its group, or the
        slice begins before 0, ends before it begins, or has steps.

    Examples
    --------
    >>> pages, positions = filter_kv_indices_for_shard_rank(
    ...     kv_indices=[8, 9, 10, 11, 13], index_slice=slice(2, 7), shard_rank=1, shard_size=2)
    >>> pages.tolist(), positions.tolist()
    ([4, 5, 6], [3, 5, 6])
    """
    start, stop = _ends(index_slice, "filter_kv_indices_for_shard_rank")
    return _core.filter_kv_indices_for_shard_rank(kv_indices, start, stop, shard_rank, shard_size)


def filter_kv_indices_for_cp_rank(
    kv_mgr: Any, kv_indices: Indices, index_slice: slice, total_pages: int | None = None
) -> tuple[Indices, slice]:
    """Select the pages of a chunk that a context-parallel rank sends, if all ranks hold all pages.

    The ranks divide the pages of the whole transfer in order, evenly up to one page, larger shares
    first; a rank sends the part of its share that is in the chunk.

    Parameters
    ----------
    kv_mgr : object
        Object with ``attn_cp_rank`` and ``attn_cp_size``, such as `KVSender`.
    kv_indices : ints [num_pages]
        Pages of the chunk.
    index_slice : slice
        Range of the pages in the transfer, equally long. The start defaults to 0 and the stop to
        the end of the transfer; no rank sends pages beyond it.
    total_pages : int, optional
        Pages of the transfer; default: the number of given pages.

    Returns
    -------
    kv_indices : of the type given, [n]
        The rank's part of the pages.
    index_slice : slice
        Range of this part in the transfer; empty, at the start of the chunk, if there are none. A
        group of one rank returns both arguments unchanged.

    Raises
    ------
    TypeError
        If `kv_mgr` lacks an attribute, a page or number is no integer, or `index_slice` is no
        slice.
    ValueError
        If pages and slice differ in length, a rank is outside its group, `total_pages` is negative,
        or the slice begins before 0, ends before it begins, or has steps.

    Examples
    --------
    Rank 1 of 2 has pages 3 and 4 of five; page 4 is in the next chunk:

    >>> from cpattn.transfer.sglang_0_5_23 import KVSender
    >>> sender = KVSender(attn_cp_rank=1, attn_cp_size=2)
    >>> filter_kv_indices_for_cp_rank(sender, [7, 8, 9], slice(1, 4), total_pages=5)
    ([9], slice(3, 4, None))
    """
    function = "filter_kv_indices_for_cp_rank"
    cp_rank, cp_size = part(kv_mgr, ("attn_cp_rank", "attn_cp_size"), function, "kv_mgr")
    start, stop = _ends(index_slice, function)
    pages = as_listed(kv_indices, function, "kv_indices")
    num_pages = len(pages)
    if total_pages is None:
        total_pages = num_pages
    if integer(cp_size, function, "attn_cp_size") == 1:
        return kv_indices, index_slice
    start = 0 if start is None else integer(start, function, "index_slice.start")
    first, end = _core.filter_kv_indices_for_cp_rank(
        num_pages, start, stop, total_pages, cp_rank, cp_size
    )
    return pages[first:end], slice(start + first, start + end)


def _ends(index_slice: slice, function: str) -> tuple[Any, Any]:
    """Return start and stop of a slice without steps."""
    if not isinstance(index_slice, slice):
        raise TypeError(
            f"{function}: index_slice must be a slice, got {type(index_slice).__name__}"
        )
    step = index_slice.step
    if step is not None and integer(step, function, "index_slice.step") != 1:
        raise ValueError(f"{function}: index_slice must have no step, got {step}")
    return index_slice.start, index_slice.stop


def get_layer_shard_range(rank: int, shard_size: int, total_layers: int) -> tuple[int, int]:
    """Find the layers that a rank of a layer split keeps: even shares, larger ones first.

    Parameters
    ----------
    rank : int
    shard_size : int
        Number of ranks that divide the layers.
    total_layers : int
        Layers of the stage.

    Returns
    -------
    start, end : int
        Layers ``start, ..., end - 1``, counted from the first of the stage; possibly none.

    Raises
    ------
    TypeError, ValueError
        If a number is no integer or out of its range, or a rank is outside the group.

    Examples
    --------
    >>> [get_layer_shard_range(rank, 3, 7) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    return _core.get_layer_shard_range(rank, shard_size, total_layers)


def get_layer_owner(local_layer_idx: int, shard_size: int, total_layers: int) -> int:
    """Find the rank of a layer split that keeps a layer.

    Parameters
    ----------
    local_layer_idx : int
        Layer, counted from the first of the stage.
    shard_size, total_layers : int
        The arguments of `get_layer_shard_range`.

    Returns
    -------
    int

    Raises
    ------
    TypeError, ValueError
        If a number is no integer or out of its range, or the layer is outside the stage.

    Examples
    --------
    >>> [get_layer_owner(layer, 3, 7) for layer in range(7)]
    [0, 0, 0, 1, 1, 2, 2]
    """
    return _core.get_layer_owner(local_layer_idx, shard_size, total_layers)


def is_elided_entry(
    src_len: int, dst_lens: Any, dst_index: int, *, allow_dst_elision: bool = True
) -> bool:
    """Tell whether a side left a buffer out, so that nothing moves for this pair of entries.

    Layers that reuse the top-k of an earlier layer keep no index keys: their entry has item length
    0 and no registered memory.

    Parameters
    ----------
    src_len : int
        The source's item length.
    dst_lens : list of int, or None
        The destination's item lengths; None if unknown.
    dst_index : int
        Entry of the destination; an entry without a length is not left out.
    allow_dst_elision : bool, optional
        Whether the destination may leave out entries.

    Returns
    -------
    bool

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type than stated, or a number is negative.

    Examples
    --------
    >>> is_elided_entry(0, [64], 0), is_elided_entry(64, [64, 0], 1), is_elided_entry(64, None, 0)
    (True, True, False)
    >>> is_elided_entry(64, [64, 0], 1, allow_dst_elision=False)
    False
    """
    function = "is_elided_entry"
    src_len = at_least(0, src_len, function, "src_len")
    dst_index = at_least(0, dst_index, function, "dst_index")
    may_elide = flag(allow_dst_elision, function, "allow_dst_elision")
    lens = [] if dst_lens is None else _core.ints(dst_lens, function, "dst_lens")
    for i, item_len in enumerate(lens):
        if item_len < 0:
            raise ValueError(f"{function}: dst_lens must be >= 0, got {item_len} at index {i}")
    return src_len == 0 or (may_elide and dst_index < len(lens) and lens[dst_index] == 0)
