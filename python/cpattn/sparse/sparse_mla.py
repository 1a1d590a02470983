# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over the selected keys of each token."""

from __future__ import annotations

from .. import _core
from .._containers import empty
from .._types import Indices, Tensor, TensorT


def flash_mla_sparse_fwd(
    q: TensorT,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Indices | None = None,
    *,
    out: TensorT | None = None,
    num_threads: int | None = None,
) -> tuple[TensorT, TensorT, TensorT]:
    """Attend with each token to the rows of `kv` that its indices select.

    One latent row serves all heads as key, and its first `d_v` elements as value. Slots of a pool
    (PAGED indices) and rows of a flat buffer (RAGGED) work alike. There is no causal mask: a token
    sees exactly its indices, and other rows are never read. Results do not depend on the other
    tokens of the call.

    Names and order of the arguments up to `topk_length` are those of FlashMLA.

    Parameters
    ----------
    q : tensor [s_q, num_heads, head_dim], float32, float16 or bfloat16
        Queries; ``head_dim`` is 576 in DeepSeek-V3.2, and may be any number up to 576.
    kv : tensor [s_kv, 1, head_dim], of the dtype of q
        Or adjacent pages, [pages, page_size, 1, head_dim]; indices count their rows. Or, for q in
        bfloat16 and ``head_dim`` 576, the FP8 rows of `quantize_kv_rows`: uint8 or float8_e4m3fn
        with 656 instead of ``head_dim``. They give the same bits as their `dequantize_kv_rows`.
    indices : tensor [s_q, 1, topk] or [s_q, topk], int32 or int64
        Rows of `kv`. Entries below 0 or beyond the rows are skipped, at any place. A row that comes
        twice counts twice.
    sm_scale : float
        Factor of q . k.
    d_v : int
        At most ``head_dim``.
    attn_sink : tensor [num_heads], float32, optional
        Extra logits, one for each head, in the denominator of each row.
    topk_length : ints [s_q], optional
        Number of valid entries in each row of `indices`; default: all. Other entries may have any
        value.
    out : tensor [s_q, num_heads, d_v], of the dtype of q, optional
        Receives the result; must not overlap an input.
    num_threads : int, optional
        Number of threads; results do not depend on it.

    Returns
    -------
    out : tensor [s_q, num_heads, d_v], of the container and dtype of q
        Zeros for a token without keys.
    max_logits : tensor [s_q, num_heads], float32
        Largest ``sm_scale`` q . k; -inf for a token without keys.
    lse : tensor [s_q, num_heads], float32
        Natural log-sum-exp; -inf for a token without keys. Neither includes the sink.

    Raises
    ------
    TypeError
        If an argument is of another type than stated, such as a list in place of a tensor.
    ValueError
        If shapes, dtypes or lengths do not fit. Indices are never an error.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q = np.ones((2, 4, 32), np.float32)
    >>> kv = np.ones((100, 1, 32), np.float32)
    >>> indices = np.array([[[7, 99, -1]], [[-1, 100, -1]]], np.int32)
    >>> out, max_logits, lse = cpattn.sparse.flash_mla_sparse_fwd(q, kv, indices, 0.125, d_v=16)
    >>> out[:, 0, 0], max_logits[:, 0]
    (array([1., 0.], dtype=float32), array([  4., -inf], dtype=float32))
    """
    function = "flash_mla_sparse_fwd"
    num_tokens, num_heads, _ = _core.shape_of(q, function, "q", 3)
    d_v = _core.integer(d_v, function, "d_v")
    if out is None:  # the core refuses sizes below 1
        out = empty(function, q, (num_tokens, num_heads, max(d_v, 0)))
    max_logits = empty(function, q, (num_tokens, num_heads), "float32")
    lse = empty(function, q, (num_tokens, num_heads), "float32")
    _core.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length,
        num_threads=num_threads, out=out, max_logits=max_logits, lse=lse,
    )  # fmt: skip
    return out, max_logits, lse
