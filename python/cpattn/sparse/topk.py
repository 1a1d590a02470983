# SPDX-License-Identifier: Apache-2.0
"""Top-k selection of sparse attention, and the transform of selected indices.

The indexer of a sparse-attention (DSA) model scores the keys of every query; attention then reads
the ``topk`` best ones. The transform method gives the unit of the indices: ``PAGED`` maps them to
slots of the cache, ``RAGGED`` to rows of the concatenated keys and values of a batch.

All selections are exact. Ties go to the smaller index, NaN counts as -inf, +0 equals -0, and -1
fills only the tail of a row. ``sorted=True`` orders by descending score, then by index;
``sorted=False`` by index, which is cheaper and reads the cache in order. A row with at most
``topk`` candidates always lists them all in ascending order, and its scores are not read.
"""

from __future__ import annotations

from enum import IntEnum

from .. import _core
from .._containers import empty
from .._types import IndexTable, Indices, TensorT
from ..context_parallel.forward_mode import ForwardMode


class TopkTransformMethod(IntEnum):
    """Unit of transformed top-k indices."""

    PAGED = 1  # slots of the cache
    RAGGED = 2  # rows of the concatenated keys and values of the batch


TopkTransformMethod.__module__ = "cpattn"


def get_topk_transform_method(
    forward_mode: ForwardMode | None = None, *, fp8_kv_cache: bool, prefill_impl: str
) -> TopkTransformMethod:
    """Tell the unit in which the attention of a batch expects its top-k indices.

    Only a plain extend has the concatenated keys and values that RAGGED counts; every other mode,
    and None, is PAGED for any implementation::

        RAGGED if forward_mode is EXTEND and
            (fp8_kv_cache and prefill_impl in ("flashmla_sparse", "triton_sparse_mla")
             or prefill_impl == "flashmla_sparse_q8")

    The rule is that of sglang 0.5.23.

    Parameters
    ----------
    forward_mode : ForwardMode, optional
        Mode of the batch.
    fp8_kv_cache : bool
        Whether the KV cache has 8-bit floats.
    prefill_impl : str
        ``"aiter"``, ``"fa3"``, ``"flashinfer_sparse_mla"``, ``"flashmla_auto"``,
        ``"flashmla_kv"``, ``"flashmla_sparse"``, ``"flashmla_sparse_q8"``, ``"intel_xpu"``,
        ``"tilelang"``, ``"triton"``, ``"triton_sparse_mla"`` or ``"trtllm"``.

    Returns
    -------
    TopkTransformMethod

    Raises
    ------
    TypeError
        If `fp8_kv_cache` is no bool, `prefill_impl` no str, or the mode no integer.
    ValueError
        If the implementation or mode is unknown.

    Examples
    --------
    >>> rule = {"fp8_kv_cache": True, "prefill_impl": "flashmla_sparse"}
    >>> get_topk_transform_method(ForwardMode.EXTEND, **rule).name
    'RAGGED'
    >>> get_topk_transform_method(ForwardMode.DECODE, **rule).name
    'PAGED'
    """
    return TopkTransformMethod(
        _core.get_topk_transform_method(forward_mode, fp8_kv_cache, prefill_impl)
    )


def topk_transform(
    logits: TensorT,
    topk: int,
    *,
    method: TopkTransformMethod | None,
    lengths: Indices,
    page_table: IndexTable | None = None,
    cu_seqlens_q: Indices | None = None,
    topk_indices_offset: Indices | None = None,
    row_starts: Indices | None = None,
    batch_idx_list: Indices | None = None,
    page_size: int = 1,
    sorted: bool = True,
) -> TensorT:
    """Select the best keys of each query and transform them for the attention that follows.

    Parameters
    ----------
    logits : tensor [num_tokens, num_keys], float32
        Scores of the keys.
    topk : int
        Keys per query, at least 1.
    method : TopkTransformMethod or None
        PAGED: `fast_topk_transform_fused`. RAGGED: `fast_topk_transform_ragged_fused`. None:
        `fast_topk`, without a transform. Arguments that the method does not need are ignored.
    lengths : ints [num_tokens]
        Candidates of each row: ``seqlens_expanded``, or the key ends of a chunk.
    page_table : ints [num_sequences, pages]
        Required for PAGED.
    cu_seqlens_q : ints [num_sequences + 1], optional
        Cumulative query lengths, for PAGED. None: a sequence for each row.
    topk_indices_offset : ints [num_tokens]
        Required for RAGGED: first row of the keys of each query's sequence. Query lengths
        (`cu_seqlens_q`) do not determine it.
    row_starts : ints [num_tokens], optional
        First candidate column of each row; indices are relative to it.
    batch_idx_list : ints [num_sequences], optional
        Rows of `page_table` for the sequences of `cu_seqlens_q`; without `cu_seqlens_q`, for each
        row of logits.
    page_size : int
        Tokens per page of `page_table`.
    sorted : bool
        Whether to sort by descending score; False sorts by ascending index.

    Returns
    -------
    tensor [num_tokens, topk], int32
        Indices in the container of logits; -1 after the last key of a row.

    Raises
    ------
    TypeError
        If an argument is of another type than stated.
    ValueError
        If PAGED comes without `page_table`, or the function of the method refuses an argument.
    RuntimeError
        If RAGGED comes without `topk_indices_offset`: metadata of a batch that is no plain extend.

    Examples
    --------
    The best keys of a query are 2 and 0. Their slots in a cache, then rows of concatenated keys:

    >>> import numpy as np, cpattn
    >>> logits = np.array([[5, 1, 7, 3]], np.float32)
    >>> method = cpattn.TopkTransformMethod
    >>> cpattn.sparse.topk_transform(logits, 2, method=method.PAGED, lengths=[4],
    ...                              page_table=[[40, 41, 12, 13]])
    array([[12, 40]], dtype=int32)
    >>> cpattn.sparse.topk_transform(logits, 2, method=method.RAGGED, lengths=[4],
    ...                              topk_indices_offset=[100])
    array([[102, 100]], dtype=int32)
    """
    topk = _core.integer(topk, "topk_transform", "topk")
    out = result_like("topk_transform", "logits", logits, topk)
    _core.topk_transform(
        logits, topk, method, lengths, page_table, cu_seqlens_q, topk_indices_offset, row_starts,
        batch_idx_list, page_size, sorted, out,
    )  # fmt: skip
    return out


def result_like(function: str, argument: str, score: TensorT, topk: int) -> TensorT:
    """Make an int32 tensor in the container of `score`, shape [rows of score, topk]."""
    rows = _core.shape_of(score, function, argument, 2)[0]
    # The core refuses sizes below 1.
    return empty(function, score, (rows, max(topk, 0)), "int32")
