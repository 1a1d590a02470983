# SPDX-License-Identifier: Apache-2.0
"""A layer of sparse attention under context parallelism: select keys, then attend to them."""

from __future__ import annotations

from typing import Literal, overload

from .. import _core
from .._containers import empty
from .._types import IndexTable, Indices, Tensor, TensorT


# fmt: off
@overload
def cp_sparse_mla(
    q: TensorT, kv: Tensor, index_q: Tensor, index_k_cache: Tensor, weights: Tensor,
    metadata: _core.ContextParallelMetadata, *, block_tables: IndexTable, page_size: int,
    topk: int, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    prefix_lens: Indices | None = None, index_k_scale: Tensor | None = None,
    num_threads: int | None = None, out: TensorT | None = None,
    return_lse: Literal[False] = False,
) -> TensorT: ...
@overload
def cp_sparse_mla(
    q: TensorT, kv: Tensor, index_q: Tensor, index_k_cache: Tensor, weights: Tensor,
    metadata: _core.ContextParallelMetadata, *, block_tables: IndexTable, page_size: int,
    topk: int, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    prefix_lens: Indices | None = None, index_k_scale: Tensor | None = None,
    num_threads: int | None = None, out: TensorT | None = None,
    return_lse: Literal[True],
) -> tuple[TensorT, TensorT]: ...
@overload
def cp_sparse_mla(
    q: TensorT, kv: Tensor, index_q: Tensor, index_k_cache: Tensor, weights: Tensor,
    metadata: _core.ContextParallelMetadata, *, block_tables: IndexTable, page_size: int,
    topk: int, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    prefix_lens: Indices | None = None, index_k_scale: Tensor | None = None,
    num_threads: int | None = None, out: TensorT | None = None,
    return_lse: bool,
) -> TensorT | tuple[TensorT, TensorT]: ...
# fmt: on
def cp_sparse_mla(
    q: TensorT,
    kv: Tensor,
    index_q: Tensor,
    index_k_cache: Tensor,
    weights: Tensor,
    metadata: _core.ContextParallelMetadata,
    *,
    block_tables: IndexTable,
    page_size: int,
    topk: int,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    prefix_lens: Indices | None = None,
    index_k_scale: Tensor | None = None,
    num_threads: int | None = None,
    out: TensorT | None = None,
    return_lse: bool = False,
) -> TensorT | tuple[TensorT, TensorT]:
    """Attend with each of a rank's tokens to the keys that the indexer selects for it.

    One call of `cp_indexer_topk`, then `flash_mla_sparse_fwd` on the selected slots. A row has the
    same bits as on a single rank, for any strategy and number of ranks.

    Parameters
    ----------
    q : tensor [rows, num_heads, head_dim], float32, float16 or bfloat16
        This rank's rows in the order of the metadata. Further rows are padding; their results are
        zeros.
    kv : tensor
        Latents of the complete sequences, as `kv` of `flash_mla_sparse_fwd`; its rows are the slots
        of the pages in `block_tables`.
    index_q, index_k_cache, weights : tensors
        The indexer's `q`, `index_k_cache` and `weights`, as in `cp_indexer_topk`; `index_q` has as
        many rows as `q`.
    metadata : ContextParallelMetadata
        Metadata of the batch and this rank, from `cpattn.build_cp_metadata`.
    block_tables, page_size, topk, prefix_lens
        See `cp_indexer_topk`.
    sm_scale, d_v, attn_sink
        See `flash_mla_sparse_fwd`.
    index_k_scale : tensor, optional
        Scales of index keys, `k_scale` of `cp_indexer_topk`.
    num_threads : int, optional
        Number of threads; results do not depend on it.
    out : tensor [rows, num_heads, d_v], of the dtype of q, optional
        Receives the result and is returned; must not overlap an input.
    return_lse : bool
        Whether to return `lse`, too.

    Returns
    -------
    out : tensor [rows, num_heads, d_v], of the container and dtype of q
    lse : tensor [rows, num_heads], float32; only with ``return_lse``
        Natural log-sum-exp without the sink; -inf for padding.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a list in place of a tensor.
    ValueError
        If `q` and `index_q` differ in rows, a cache lacks a selected slot, or one of the two
        functions refuses its arguments.

    Examples
    --------
    Rank 0 of 2 has the first and the last of four new tokens, behind a prefix of three:

    >>> import numpy as np, cpattn
    >>> metadata = cpattn.build_cp_metadata([4], [7], cp_rank=0, cp_size=2)
    >>> index_q, weights = np.ones((2, 1, 16), np.float32), np.ones((2, 1), np.float32)
    >>> keys = np.arange(8 * 16, dtype=np.float32).reshape(2, 4, 16)   # two pages of four keys
    >>> q, latents = np.zeros((2, 1, 32), np.float32), np.arange(8.0, dtype=np.float32)
    >>> latents = np.repeat(latents, 32).reshape(8, 1, 32)
    >>> out = cpattn.sparse.cp_sparse_mla(q, latents, index_q, keys, weights, metadata,
    ...                                   block_tables=[[0, 1]], page_size=4, topk=3,
    ...                                   sm_scale=1.0, d_v=16)
    >>> out[:, 0, 0]                            # means of slots 3, 2, 1 and of 6, 5, 4
    array([2., 5.], dtype=float32)
    """
    function = "cp_sparse_mla"
    rows, num_heads, _ = _core.shape_of(q, function, "q", 3)
    d_v = _core.integer(d_v, function, "d_v")
    return_lse = _core.flag(return_lse, function, "return_lse")
    if out is None:  # the core refuses sizes below 1
        out = empty(function, q, (rows, num_heads, max(d_v, 0)))
    max_logits, lse = (empty(function, q, (rows, num_heads), "float32") for _ in range(2))
    _core.cp_sparse_mla(
        q, kv, index_q, index_k_cache, weights, metadata, block_tables, page_size, topk,
        sm_scale, d_v, attn_sink, prefix_lens, index_k_scale, num_threads, out, max_logits, lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out
