# SPDX-License-Identifier: Apache-2.0
"""The sparse flash attention operator of Ascend's torch_npu, on a CPU."""

from __future__ import annotations

from .. import _core
from .._containers import empty
from .._types import IndexTable, Indices, Tensor, TensorT

NO_LIMIT = 2**63 - 1


def npu_sparse_flash_attention(
    query: TensorT,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: IndexTable | None = None,
    actual_seq_lengths_query: Indices | None = None,
    actual_seq_lengths_kv: Indices | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[TensorT, TensorT, TensorT]:
    """Attend with each query to its selected keys, as ``torch_npu``'s operator does.

    The signature is that operator's. Unlike `flash_mla_sparse_fwd` it takes positions within
    sequences, and hides keys beyond the query's own position. Sizes that the NPU's hardware rejects
    (dimensions, head counts, ``attention_mode=0``) work here.

    Parameters
    ----------
    query : tensor [B, S1, N, D] or, as TND, [T1, N, D], float32, float16 or bfloat16
        B sequences of S1 queries, or T1 queries of all sequences; N heads of D elements.
    key, value : tensors, of the dtype of query
        [B, S2, 1, D], [T2, 1, D] as TND, or [blocks, block_size, 1, D] as PA_BSND, with blocks that
        follow each other in memory. `value` may have another D, and be a part of `key`.
    sparse_indices : tensor [B, S1, 1, K] or [T1, 1, K], int32 or int64
        Blocks of `sparse_block_size` positions within the sequence of the query. The first
        entry below 0 ends a row; blocks beyond the sequence have no keys.
    scale_value : float
        Factor of q . k.
    block_table : ints [B, >= ceil(kv_len / block_size)]
        Block ids, with PA_BSND, and only then.
    actual_seq_lengths_query, actual_seq_lengths_kv : ints [B]
        Lengths of the sequences, default S1 and S2. TND requires running sums. Blocks require the
        lengths of `key`, as lengths.
    query_rope, key_rope : tensors, of the dtype of query
        More dimensions of query and key, with ``attention_mode=2``.
    sparse_block_size : int
        Positions per entry of `sparse_indices`.
    layout_query : str
        BSND or TND.
    layout_kv : str
        The layout of `query`, or PA_BSND.
    sparse_mode : int
        0: a query sees all keys of its blocks. 3: a query sees keys up to its own position; the
        last query of a sequence is at its last key.
    pre_tokens, next_tokens : int
        Only the defaults are allowed.
    attention_mode : int
        2: absorbed MLA. 0: attention without rope parts.
    return_softmax_lse : bool
        Whether to return the other two results.

    Returns
    -------
    out : tensor of the shape of query with the D of value
        Result in the container and dtype of query. Zeros for queries without keys, and past their
        sequence's length.
    softmax_max, softmax_sum : tensors [B, 1, S1, N] or [1, T1, N], float32
        Largest scaled score, and sum of exp(score - softmax_max); -inf and 0 without keys. Shape
        [0] without ``return_softmax_lse``.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type than stated, such as a list in place of a tensor, or
        breaks a rule of the list above.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> query = np.ones((2, 4, 16), np.float32)        # two new tokens of one sequence
    >>> cache = np.ones((3, 8, 1, 16), np.float32)     # three blocks of eight tokens
    >>> indices = np.array([[[0, 9]], [[9, -1]]])
    >>> out, softmax_max, softmax_sum = cpattn.npu.npu_sparse_flash_attention(
    ...     query, cache, cache, indices, 0.25, block_table=[[2, 0]], layout_query="TND",
    ...     layout_kv="PA_BSND", actual_seq_lengths_query=[2], actual_seq_lengths_kv=[10],
    ...     return_softmax_lse=True)
    >>> softmax_sum[0, :, 0]                           # token 0 stands at 8 and hides 9
    array([1., 1.], dtype=float32)
    """
    function = "npu_sparse_flash_attention"
    shape = _core.shape_of(query, function, "query")
    v_head_dim = _core.shape_of(value, function, "value")[-1:]  # no dimension: refused below
    return_softmax_lse = _core.flag(return_softmax_lse, function, "return_softmax_lse")
    out = empty(function, query, (*shape[:-1], *v_head_dim))
    rows = (*shape[:-3], 1, *shape[-3:-1]) if return_softmax_lse else (0,)
    softmax_max = empty(function, query, rows, "float32")
    softmax_sum = empty(function, query, rows, "float32")
    _core.npu_sparse_flash_attention(
        query, key, value, sparse_indices, scale_value, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query,
        actual_seq_lengths_kv=actual_seq_lengths_kv, query_rope=query_rope, key_rope=key_rope,
        sparse_block_size=sparse_block_size, layout_query=layout_query, layout_kv=layout_kv,
        sparse_mode=sparse_mode, pre_tokens=pre_tokens, next_tokens=next_tokens,
        attention_mode=attention_mode, out=out,
        softmax_max=softmax_max if return_softmax_lse else None,
        softmax_sum=softmax_sum if return_softmax_lse else None,
    )  # fmt: skip
    return out, softmax_max, softmax_sum
