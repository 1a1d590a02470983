# SPDX-License-Identifier: Apache-2.0
"""The sparse-attention indexer under context parallelism."""

from __future__ import annotations

from .. import _core
from .._containers import empty
from .._types import IndexTable, Indices, Tensor, TensorT


def cp_indexer_topk(
    q: TensorT,
    index_k_cache: Tensor,
    weights: Tensor,
    metadata: _core.ContextParallelMetadata,
    *,
    block_tables: IndexTable,
    page_size: int,
    topk: int,
    prefix_lens: Indices | None = None,
    k_scale: Tensor | None = None,
    sorted: bool = True,
    num_threads: int | None = None,
) -> TensorT:
    """Select the keys that each of a rank's tokens attends to, over paged sequences with prefixes.

    For the token at position ``p`` of its sequence, prefix counted::

        logit[j] = k_scale[j] * sum(weights[h] * relu(q[h] @ k[j]) for h in heads)   # j <= p
        indices = the topk keys j with the largest logit[j]

    One plan computes all rows of all sequences, for any strategy, so the result of a token does not
    depend on the number of ranks, the rank, or the rest of the batch.

    Parameters
    ----------
    q : tensor [rows, num_heads, head_dim], of the dtype of the keys
        This rank's rows in the order of the metadata (zigzag: all prev blocks, then all next
        blocks). Further rows are padding: they are never read, and their results are -1.
    index_k_cache : tensor
        Index keys of the complete sequences, new tokens included. Rows of bfloat16, float32,
        float8_e4m3fn or int8, [num_pages, page_size, head_dim], [num_pages, page_size, 1, head_dim]
        or [num_slots, 1, head_dim]. Or uint8 [num_pages, page_size * (head_dim + 4)], also as
        [num_pages, page_size, head_dim + 4] or [num_pages, page_size, 1, head_dim + 4]: each page
        has its rows in float8_e4m3fn, then their float32 scales.
    weights : tensor [rows, num_heads] or [rows, num_heads, 1], float32 or bfloat16
        Factor of each head, times the scale of quantised queries.
    metadata : ContextParallelMetadata
        Metadata of the batch and this rank, from `cpattn.build_cp_metadata`.
    block_tables : ints [batch, pages]
        Pages of each sequence, its prefix first; further entries are never read.
    page_size : int
        Tokens per page.
    topk : int
        Keys per row, at least 1.
    prefix_lens : ints [batch], optional
        Cached prefix of each sequence, in tokens. Required with "bare" metadata of a batch with a
        prefix; it must match the metadata. Forbidden with "baked" metadata, whose lengths include
        it.
    k_scale : tensor of the shape of `index_k_cache` without its last dimension, float32, optional
        Factor of each key; not with uint8, which includes scales.
    sorted : bool
        Whether rows are by descending score, ties by ascending index. Otherwise, and in rows with
        at most topk keys, they are by ascending index.
    num_threads : int, optional
        Default: `set_num_threads`, ``CPATTN_NUM_THREADS``, or all CPUs.

    Returns
    -------
    tensor [rows, topk], int32
        Positions within the sequence, -1 after the last. NaN counts as -inf.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a list in place of a tensor.
    ValueError
        If there are fewer rows than in the metadata, a prefix is counted twice, not at all or
        differently, a token is beyond the block table, page ids are outside the cache, or shapes or
        dtypes do not fit.

    Examples
    --------
    Rank 0 of 2 has the first and the last of four new tokens, behind a prefix of three:

    >>> import numpy as np, cpattn
    >>> metadata = cpattn.build_cp_metadata([4], [7], cp_rank=0, cp_size=2)
    >>> q, weights = np.ones((2, 1, 16), np.float32), np.ones((2, 1), np.float32)
    >>> keys = np.arange(8 * 16, dtype=np.float32).reshape(2, 4, 16)   # two pages of four keys
    >>> cpattn.sparse.cp_indexer_topk(q, keys, weights, metadata, block_tables=[[0, 1]],
    ...                               page_size=4, topk=3)
    array([[3, 2, 1],
           [6, 5, 4]], dtype=int32)
    """
    function = "cp_indexer_topk"
    rows = _core.shape_of(q, function, "q", 3)[0]
    topk = _core.integer(topk, function, "topk")
    out = empty(function, q, (rows, max(topk, 0)), "int32")  # the core refuses topk < 1
    _core.cp_indexer_topk(
        q, index_k_cache, weights, metadata, block_tables, page_size, topk, prefix_lens, k_scale,
        sorted, num_threads, out,
    )  # fmt: skip
    return out


def dcp_local_indices(
    indices: TensorT, *, dcp_rank: int, dcp_size: int, interleave_size: int = 1
) -> TensorT:
    """Select those global top-k indices that one rank of decode context parallelism owns.

    Position ``p`` of a sequence lies on rank ``p // interleave_size % dcp_size``, which stores its
    positions in order. Each index appears on exactly one rank.

    Parameters
    ----------
    indices : tensor [num_tokens, topk], int32
        Positions within the sequence; negative ones are skipped.
    dcp_rank, dcp_size : int
        This rank, and the number of ranks.
    interleave_size : int
        Consecutive positions per rank.

    Returns
    -------
    tensor [num_tokens, topk], int32
        Positions among the keys that the rank holds, in the order of `indices` without gaps,
        then -1.

    Raises
    ------
    TypeError
        If `indices` is no tensor, or another argument no integer.
    ValueError
        If `indices` is not int32 with two dimensions, the rank is outside [0, dcp_size), or a size
        is below 1.

    Examples
    --------
    Rank 1 of 2 holds the odd positions, so position 9 is its fifth key:

    >>> import numpy as np, cpattn
    >>> indices = np.array([[9, 4, 7, 2, -1]], np.int32)
    >>> cpattn.sparse.dcp_local_indices(indices, dcp_rank=1, dcp_size=2)
    array([[ 4,  3, -1, -1, -1]], dtype=int32)
    """
    function = "dcp_local_indices"
    out = empty(function, indices, _core.shape_of(indices, function, "indices", 2), "int32")
    _core.dcp_local_indices(indices, dcp_rank, dcp_size, interleave_size, out)
    return out
