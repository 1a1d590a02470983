# SPDX-License-Identifier: Apache-2.0
"""Selections and index tables with the names and arguments of sglang 0.5.23.

``fast_topk`` and its fused variants have the names of sglang's kernel package; they follow the
rules of `cpattn.sparse.topk` for all selections. The other functions map indices to slots, as the
metadata of sglang's sparse-attention backend does.
"""

from __future__ import annotations

from .. import _core
from .._containers import empty, tensor_of
from .._types import IndexTable, Indices, Tensor, TensorT
from .topk import result_like

__all__ = [
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "pad_topk_indices",
    "page_table_to_topk",
    "transform_index_page_table_decode",
    "transform_index_page_table_prefill",
]


def fast_topk(
    score: TensorT,
    lengths: Indices,
    topk: int,
    row_starts: Indices | None = None,
    *,
    sorted: bool = True,
) -> TensorT:
    """Select the indices of the largest scores of each row.

    Row ``i`` selects among ``score[i, start : start + length]`` with ``start = row_starts[i]``
    and ``length = lengths[i]``; indices are relative to ``start``.

    Parameters
    ----------
    score : tensor [num_rows, num_scores], float32
        Any row stride, contiguous columns. Columns outside the candidates are never read.
    lengths : ints [num_rows]
        Zero and negative lengths are rows without candidates.
    topk : int
        1 to 2**28.
    row_starts : ints [num_rows], optional
        Default 0.
    sorted : bool
        Whether to sort by descending score, ties by ascending index; False: by ascending index.

    Returns
    -------
    tensor [num_rows, topk], int32
        Indices in the container of score. A row with at most `topk` candidates lists all,
        ascending, then -1.

    Raises
    ------
    TypeError
        If `score` is no tensor, or a length or a start no integer.
    ValueError
        If candidates are outside the row, or shapes do not fit.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> score = np.array([[0.5, 3.0, 1.0, 3.0]], np.float32)
    >>> cpattn.sparse.sglang_0_5_23.fast_topk(score, [4], 3)
    array([[1, 3, 2]], dtype=int32)
    >>> cpattn.sparse.sglang_0_5_23.fast_topk(score, [2], 3, row_starts=[2])
    array([[ 0,  1, -1]], dtype=int32)
    """
    topk = _core.integer(topk, "fast_topk", "topk")
    out = result_like("fast_topk", "score", score, topk)
    _core.fast_topk(score, lengths, topk, row_starts, sorted, out)
    return out


def fast_topk_transform_fused(
    score: TensorT,
    lengths: Indices,
    page_table_size_1: IndexTable,
    cu_seqlens_q: Indices | None,
    topk: int,
    row_starts: Indices | None = None,
    *,
    page_size: int = 1,
    sorted: bool = True,
) -> TensorT:
    """Select as `fast_topk` does, and map the indices to slots of the cache.

    With ``cu_seqlens_q[s] <= i < cu_seqlens_q[s + 1]``, an index of row ``i`` becomes::

        page_table_size_1[s, index // page_size] * page_size + index % page_size

    Parameters
    ----------
    score, lengths, topk, row_starts, sorted
        See `fast_topk`.
    page_table_size_1 : ints [num_sequences, pages]
        Slots with a page size of 1, else page ids. It must cover the candidates of a row, and
        entries that are read must be >= 0.
    cu_seqlens_q : ints [num_sequences + 1], or None
        Running sums from 0 to num_rows. None: a table row for each row of score, as in decode.
    page_size : int
        Tokens per page of the table; sglang's function only has pages of one token.

    Returns
    -------
    tensor [num_rows, topk], int32
        Slots in the container of score, in the order of the indices, then -1.

    Raises
    ------
    TypeError
        If `score` is no tensor, or another argument holds no integers.
    ValueError
        If `fast_topk` refuses an argument, candidates exceed the page table, an entry that is read
        is negative, or query lengths do not add up to the rows.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> score = np.array([[5, 1, 7, 3]], np.float32)
    >>> fused = cpattn.sparse.sglang_0_5_23.fast_topk_transform_fused
    >>> fused(score, [4], [[40, 41, 12, 13]], None, 2)
    array([[12, 40]], dtype=int32)
    >>> fused(score, [4], [[20, 6]], None, 2, page_size=2)
    array([[12, 40]], dtype=int32)
    """
    topk = _core.integer(topk, "fast_topk_transform_fused", "topk")
    out = result_like("fast_topk_transform_fused", "score", score, topk)
    _core.fast_topk_transform_fused(
        score, lengths, page_table_size_1, cu_seqlens_q, page_size, topk, row_starts, sorted, out
    )
    return out


def fast_topk_transform_ragged_fused(
    score: TensorT,
    lengths: Indices,
    topk_indices_offset: Indices,
    topk: int,
    row_starts: Indices | None = None,
    *,
    sorted: bool = True,
) -> TensorT:
    """Select as `fast_topk` does, and add ``topk_indices_offset[i]`` to the indices of row ``i``.

    The results are rows of concatenated keys and values.

    Parameters
    ----------
    score, lengths, topk, row_starts, sorted
        See `fast_topk`.
    topk_indices_offset : ints [num_rows]
        Begin of each row's sequence in the concatenation.

    Returns
    -------
    tensor [num_rows, topk], int32
        Rows in the container of score; -1 after the last index stays -1.

    Raises
    ------
    TypeError
        If `score` is no tensor, or another argument holds no integers.
    ValueError
        If `fast_topk` refuses an argument, or an offset is negative or exceeds int32.

    Examples
    --------
    Two sequences of three keys each:

    >>> import numpy as np, cpattn
    >>> score = np.array([[1, 2, 3], [3, 2, 1]], np.float32)
    >>> cpattn.sparse.sglang_0_5_23.fast_topk_transform_ragged_fused(score, [3, 1], [0, 3], 2)
    array([[ 2,  1],
           [ 3, -1]], dtype=int32)
    """
    topk = _core.integer(topk, "fast_topk_transform_ragged_fused", "topk")
    out = result_like("fast_topk_transform_ragged_fused", "score", score, topk)
    _core.fast_topk_transform_ragged_fused(
        score, lengths, topk_indices_offset, topk, row_starts, sorted, out
    )
    return out


def transform_index_page_table_decode(
    page_table: TensorT, topk_indices: Tensor, page_size: int = 1
) -> TensorT:
    """Map selected indices to slots, row by row of the page table.

    Parameters
    ----------
    page_table : tensor [num_sequences, pages], int32 or int64
        Slots with a page size of 1, else page ids.
    topk_indices : tensor [num_sequences, topk], int32 or int64
        Positions within the sequence; negative ones become -1.
    page_size : int
        Tokens per page of the table.

    Returns
    -------
    tensor [num_sequences, topk], int32
        Slots in the container of page_table.

    Raises
    ------
    TypeError
        If an argument is no tensor, or not of int32 or int64.
    ValueError
        If indices exceed the page table, an entry that is read is negative, or shapes do not fit.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> page_table, indices = np.array([[40, 41, 12]]), np.array([[2, 0, -1]])
    >>> cpattn.sparse.sglang_0_5_23.transform_index_page_table_decode(page_table, indices)
    array([[12, 40, -1]], dtype=int32)
    """
    out = _slots("transform_index_page_table_decode", page_table, topk_indices)
    _core.transform_index_page_table_decode(page_table, topk_indices, page_size, out)
    return out


def transform_index_page_table_prefill(
    page_table: TensorT, topk_indices: Tensor, extend_lens_cpu: Indices, page_size: int = 1
) -> TensorT:
    """Map selected indices to slots, for several rows of each sequence.

    Parameters
    ----------
    page_table : tensor [num_sequences, pages], int32 or int64
        Slots with a page size of 1, else page ids.
    topk_indices : tensor [num_tokens, topk], int32 or int64
        Positions within the sequence; negative ones become -1.
    extend_lens_cpu : ints [num_sequences]
        Rows of each sequence; they add up to num_tokens.
    page_size : int
        Tokens per page of the table.

    Returns
    -------
    tensor [num_tokens, topk], int32
        Slots in the container of page_table.

    Raises
    ------
    TypeError
        If an argument is no tensor or not of int32 or int64, or a length is no integer.
    ValueError
        If lengths do not add up, indices exceed the page table, an entry that is read is negative,
        or shapes do not fit.

    Examples
    --------
    The first sequence has two rows, the second has one:

    >>> import numpy as np, cpattn
    >>> page_table, indices = np.array([[40, 41], [12, 13]]), np.array([[0, -1], [1, 0], [1, -1]])
    >>> cpattn.sparse.sglang_0_5_23.transform_index_page_table_prefill(page_table, indices, [2, 1])
    array([[40, -1],
           [41, 40],
           [13, -1]], dtype=int32)
    """
    out = _slots("transform_index_page_table_prefill", page_table, topk_indices)
    _core.transform_index_page_table_prefill(
        page_table, topk_indices, extend_lens_cpu, page_size, out
    )
    return out


def page_table_to_topk(
    page_table: TensorT,
    lengths: Indices,
    topk: int,
    *,
    num_rows: int | None = None,
    page_size: int = 1,
) -> TensorT:
    """List the slots of whole sequences, when no selection is needed.

    Row ``i`` has the slots of the first ``min(lengths[i], topk)`` tokens of sequence ``i``, then
    -1; rows from the number of sequences up to `num_rows` are all -1.

    Parameters
    ----------
    page_table : tensor [num_sequences, pages], int32 or int64
        Slots with a page size of 1, else page ids.
    lengths : ints [num_sequences]
        Tokens of each sequence; negative lengths count as 0.
    topk : int
        At least 1.
    num_rows : int, optional
        At least num_sequences, the default.
    page_size : int
        Tokens per page of the table.

    Returns
    -------
    tensor [num_rows, topk], int32
        Slots in the container of page_table.

    Raises
    ------
    TypeError
        If `page_table` is no tensor or not of int32 or int64, or a length no integer.
    ValueError
        If a sequence is longer than the table, an entry that is read is negative, there are fewer
        rows than sequences, or shapes do not fit.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> cpattn.sparse.sglang_0_5_23.page_table_to_topk(np.array([[40, 41, 12]]), [2], 3, num_rows=2)
    array([[40, 41, -1],
           [-1, -1, -1]], dtype=int32)
    """
    function = "page_table_to_topk"
    rows = _core.shape_of(page_table, function, "page_table", 2)[0]
    topk = _core.integer(topk, function, "topk")
    if topk < 1:
        raise ValueError(f"{function}: topk must be >= 1, got {topk}")
    if num_rows is not None:
        number = _core.integer(num_rows, function, "num_rows")
        if number < rows:
            raise ValueError(
                f"{function}: num_rows must be at least that of page_table, {rows}, got {number}"
            )
        rows = number
    out = empty(function, page_table, (rows, topk), "int32")
    _core.page_table_to_topk(page_table, lengths, page_size, out)
    return out


def pad_topk_indices(topk_indices: TensorT, num_tokens: int) -> TensorT:
    """Append rows of -1 for padding tokens that the indexer did not see.

    Parameters
    ----------
    topk_indices : tensor [num_rows, topk], int32 or int64
        Selected indices, on any device.
    num_tokens : int
        At least the number of rows.

    Returns
    -------
    tensor [num_tokens, topk]
        Indices in the dtype of `topk_indices`; `topk_indices` itself if there is nothing to append.

    Raises
    ------
    TypeError
        If `topk_indices` is no tensor or not of int32 or int64, or `num_tokens` no integer.
    ValueError
        If the number of dimensions is not two, or there are fewer tokens than rows.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> cpattn.sparse.sglang_0_5_23.pad_topk_indices(np.array([[2, 0]], np.int32), 2)
    array([[ 2,  0],
           [-1, -1]], dtype=int32)
    """
    function = "pad_topk_indices"
    indices = tensor_of(topk_indices, function, "topk_indices")
    if indices.ndim != 2:
        raise ValueError(
            f"{function}: topk_indices must have 2 dimensions, got shape {list(indices.shape)}"
        )
    dtype = str(indices.dtype).removeprefix("torch.")
    if dtype not in ("int32", "int64"):
        raise TypeError(f"{function}: topk_indices must be int32 or int64, got {dtype}")
    rows, topk = indices.shape
    num_tokens = _core.integer(num_tokens, function, "num_tokens")
    if num_tokens < rows:
        raise ValueError(
            f"pad_topk_indices: num_tokens must be at least the number of rows, {rows}, "
            f"got {num_tokens}"
        )
    if num_tokens == rows:
        return topk_indices
    out = empty(function, indices, (num_tokens, topk))
    out[:rows] = indices
    out[rows:] = -1
    return out


def _slots(function: str, page_table: TensorT, topk_indices: Tensor) -> TensorT:
    _core.shape_of(page_table, function, "page_table", 2)
    shape = _core.shape_of(topk_indices, function, "topk_indices", 2)
    return empty(function, page_table, shape, "int32")
