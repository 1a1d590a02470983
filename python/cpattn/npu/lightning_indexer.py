# SPDX-License-Identifier: Apache-2.0
"""The sparse-attention indexer operator of Ascend's torch_npu, on a CPU."""

from __future__ import annotations

from .. import _core
from .._containers import empty, numpy_dtype, torch_of
from .._types import IndexTable, Indices, Tensor, TensorT

INT64_MAX = 2**63 - 1


def npu_lightning_indexer(
    query: TensorT,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Indices | None = None,
    actual_seq_lengths_key: Indices | None = None,
    block_table: IndexTable | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = INT64_MAX,
    next_tokens: int = INT64_MAX,
    return_value: bool = False,
) -> tuple[TensorT, TensorT]:
    """Select the top-k keys of each query, as ``torch_npu``'s operator does.

    The signature is that operator's. For query i of S1 and key j of S2, both of one sequence and
    counted by its actual lengths::

        score[i, j] = sum(weights[i, n] * relu(query[i, n] @ key[j]) for n in heads)
        visible = j < S2 if sparse_mode == 0 else j <= i + S2 - S1

    Results that the NPU leaves undefined are defined here: the order of indices, ties, NaN (as
    -inf), and rows of no sequence (-1). Sizes that the NPU's hardware rejects work here: head
    counts, D, block sizes, a `sparse_count` above 2048, values with blocks.

    Parameters
    ----------
    query : tensor [B, S1, N, D] or, as TND, [T1, N, D], bfloat16 or float32
        B sequences of S1 queries, or T1 queries of all sequences; N heads of D elements.
    key : tensor, of the dtype of query
        [B, S2, 1, D], [T2, 1, D] as TND, or [blocks, block_size, 1, D] as PA_BSND.
    weights : tensor [B, S1, N] or [T1, N], of the dtype of query, or float32
        Factor of each head.
    actual_seq_lengths_query : ints [B]
        Queries of each sequence, default S1. TND requires it, as running sums of the lengths.
        Further rows are never read.
    actual_seq_lengths_key : ints [B]
        Keys of each sequence, default S2. PA_BSND requires it; TND requires it as running sums.
    block_table : ints [B, >= ceil(S2 / block_size)]
        Block ids, with PA_BSND; entries beyond a sequence's own blocks are never read.
    layout_query : str
        BSND or TND.
    layout_key : str
        The layout of the queries, or PA_BSND.
    sparse_count : int
        Indices for each query, at least 1.
    sparse_mode : int
        0: a query sees all keys. 3: a query sees keys up to its own position; the last query of a
        sequence is at its last key.
    pre_tokens, next_tokens : int
        Only the defaults are allowed.
    return_value : bool
        Whether to return the scores.

    Returns
    -------
    indices : tensor [B, S1, 1, sparse_count] or [T1, 1, sparse_count], int32
        Positions within the sequence by descending score, ties by ascending index. If all keys are
        selected, positions are ascending. Unused entries are -1.
    values : tensor of the shape of indices, of the dtype of query
        Scores of the indices, -inf for unused entries. Empty, shape [0], without ``return_value``.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type than stated, such as a list in place of a tensor, or
        breaks a rule of the list above.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> query, weights = np.ones((2, 1, 16), np.float32), np.ones((2, 1), np.float32)
    >>> blocks = np.arange(8 * 16, dtype=np.float32).reshape(2, 4, 1, 16)
    >>> indices, _ = cpattn.npu.npu_lightning_indexer(
    ...     query, blocks, weights, layout_query="TND", layout_key="PA_BSND", sparse_count=3,
    ...     actual_seq_lengths_query=[2], actual_seq_lengths_key=[5], block_table=[[0, 1]])
    >>> indices[:, 0]
    array([[3, 2, 1],
           [4, 3, 2]], dtype=int32)
    """
    function = "npu_lightning_indexer"
    sparse_count = _core.integer(sparse_count, function, "sparse_count")
    count = max(sparse_count, 0)  # the core refuses sparse_count < 1
    shape = (*_core.shape_of(query, function, "query")[:-2], 1, count)
    indices = empty(function, query, shape, "int32")
    return_value = _core.flag(return_value, function, "return_value")
    scores = empty(function, query, shape, "float32") if return_value else None
    _core.npu_lightning_indexer(
        query, key, weights, actual_seq_lengths_query, actual_seq_lengths_key, block_table,
        layout_query, layout_key, sparse_count, sparse_mode, pre_tokens, next_tokens, indices,
        scores,
    )  # fmt: skip
    if scores is None:
        return indices, empty(function, query, (0,))
    if torch_of(query) is not None:
        return indices, scores.to(query.dtype)
    return indices, scores.astype(numpy_dtype(_core.dtype_of(query, function, "query")))
