# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: operators computed without tricks, to test others against.

Arguments are those of the functions of the same name in `cpattn`, in any container and
in float64, float32, float16 or bfloat16. Results are new float64 NumPy arrays. The code
is C++ with Eigen and shares nothing with the kernels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from . import _core
from ._containers import empty, tensor_of
from ._types import Tensor

__all__ = [
    "dequantize_kv_rows",
    "flash_mla_sparse_fwd",
    "hadamard_transform",
    "indexer_logits",
    "merge_state",
    "paged_attention",
    "rms_norm",
]

Float64Array = np.ndarray[Any, np.dtype[np.float64]]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_lens: Any,
    kv_lens: Any,
    block_tables: Any,
    page_size: int | None = None,
    kv_layout: Literal["NHD", "HND"] = "NHD",
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    allow_short_kv: bool = False,
) -> tuple[Float64Array, Float64Array]:
    """Attention over paged keys and values.

    Parameters
    ----------
    q : tensor, shape [sum(q_lens), num_heads, head_dim]
    k_cache, v_cache : tensor, shape [num_pages, page_size, num_kv_heads, dim]
        With ``kv_layout="HND"`` [num_pages, num_kv_heads, page_size, dim]; 3-D with
        ``page_size`` [num_pages * page_size, num_kv_heads, dim].
    q_lens, kv_lens : sequence of int, length B
        The last q_lens[r] of kv_lens[r] tokens of sequence r are the queries. Under `causal`
        there are at least as many tokens, unless ``allow_short_kv``: then the first queries stand
        before token 0 and see nothing.
    block_tables : integer array, shape [B, >= ceil(kv_len / page_size)]
    scale : float, optional
        1 / sqrt(head_dim) if not given.
    causal, window, custom_mask
        Key j is visible from position p if j <= p (``causal``), p - window <= j
        (``window``) and its flag in ``custom_mask``, bool [sum(q_lens * kv_lens)], is set.
    softcap : float
        If positive, scores become softcap * tanh(score / softcap).
    sinks : tensor, shape [num_heads], optional
        One more logit in the denominator of each row.

    Returns
    -------
    out : float64 array, shape [sum(q_lens), num_heads, v_head_dim]
        Zeros for a row that sees no key.
    lse : float64 array, shape [sum(q_lens), num_heads]
        Natural logarithm, without the sink; -inf for a row that sees no key.
    """
    function = "reference.paged_attention"
    if _core.text(kv_layout, function, "kv_layout") not in ("NHD", "HND"):
        raise ValueError(f"{function}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    if page_size is None:
        shape = _core.shape_of(k_cache, function, "k_cache")
        if len(shape) != 4:
            raise ValueError(f"{function}: a 3-D cache needs page_size")
        page_size = shape[1 if kv_layout == "NHD" else 2]
    q_lens = _core.ints(q_lens, function, "q_lens")
    kv_lens = _core.ints(kv_lens, function, "kv_lens")
    causal = _core.flag(causal, function, "causal")
    allow_short_kv = _core.flag(allow_short_kv, function, "allow_short_kv")
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=False)):
        if causal and not allow_short_kv and 0 <= kv_len < q_len:
            raise ValueError(
                f"{function}: kv_lens must be at least q_lens under causal, got "
                f"{kv_len} for {q_len} at index {sequence}"
            )
    num_tokens, num_heads, head_dim = _core.shape_of(q, function, "q", 3)
    v_head_dim = (0, *_core.shape_of(v_cache, function, "v_cache"))[-1]
    out = _float64(function, num_tokens, num_heads, v_head_dim)
    lse = _float64(function, num_tokens, num_heads)
    _core.reference.paged_attention(
        q,
        k_cache,
        v_cache,
        q_lens=q_lens,
        kv_lens=kv_lens,
        block_tables=block_tables,
        page_size=page_size,
        hnd=kv_layout == "HND",
        scale=max(head_dim, 1) ** -0.5 if scale is None else scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        custom_mask=custom_mask,
        out=out,
        lse=lse,
    )
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Any = None,
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Attention of each token over the rows of `kv` that its indices name.

    Parameters
    ----------
    q : tensor, shape [s_q, num_heads, head_dim]
    kv : tensor, shape [s_kv, 1, head_dim]
        A value is the first `d_v` elements of its key.
    indices : integer array, shape [s_q, 1, topk] or [s_q, topk]
        What is not in [0, s_kv) is skipped.
    sm_scale : float
    d_v : int
    attn_sink : tensor, shape [num_heads], optional
        One more logit in the denominator of each row.
    topk_length : sequence of int, length s_q, optional
        How many entries of each row of `indices` count; all by default.

    Returns
    -------
    out : float64 array, shape [s_q, num_heads, d_v]
        Zeros for a token without keys.
    max_logits, lse : float64 array, shape [s_q, num_heads]
        The largest scaled score and the natural logarithm of the sum of exponentials, without
        the sink; -inf for a token without keys.
    """
    function = "reference.flash_mla_sparse_fwd"
    num_tokens, num_heads, _ = _core.shape_of(q, function, "q", 3)
    shape = _core.shape_of(indices, function, "indices")
    if len(shape) == 3:
        if shape[1] != 1:
            raise ValueError(
                f"{function}: indices must be [s_q, 1, topk] or [s_q, topk], got {list(shape)}"
            )
        indices = tensor_of(indices, function, "indices")[:, 0]
    d_v = _core.integer(d_v, function, "d_v")
    out = _float64(function, num_tokens, num_heads, max(d_v, 0))  # the core refuses those below 1
    max_logits, lse = _float64(function, 2, num_tokens, num_heads)
    _core.reference.flash_mla_sparse_fwd(
        q,
        kv,
        indices,
        sm_scale=sm_scale,
        d_v=d_v,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
        max_logits=max_logits,
        lse=lse,
    )
    return out, max_logits, lse


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Float64Array, Float64Array]:
    """Merge attention over two disjoint sets of keys.

    Parameters
    ----------
    out_a, out_b : tensor, shape [num_tokens, num_heads, head_dim]
    lse_a, lse_b : tensor, shape [num_tokens, num_heads]
        Natural logarithms; a part with -inf is ignored, whatever it holds.

    Returns
    -------
    out, lse : float64 array
        New arrays: unlike `cpattn.merge_state`, the inputs stay as they are.
    """
    function = "reference.merge_state"
    out = _float64(function, *_core.shape_of(out_a, function, "out_a"))
    lse = _float64(function, *_core.shape_of(lse_a, function, "lse_a"))
    _core.reference.merge_state(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def indexer_logits(
    q: Tensor, k: Tensor, weights: Tensor, ks: Any, ke: Any, *, k_scale: Tensor | None = None
) -> Float64Array:
    """Scores of the lightning indexer.

    Parameters
    ----------
    q : tensor, shape [T, H, D]
    k : tensor, shape [S, D]
    weights : tensor, shape [T, H]
    ks, ke : sequence of int, length T
        Query i scores the keys from ks[i] up to, without, ke[i].
    k_scale : tensor, shape [S], optional

    Returns
    -------
    logits : float64 array, shape [T, S]
        k_scale[j] * sum_h weights[i, h] * max(0, q[i, h] . k[j]); -inf for other keys.
    """
    function = "reference.indexer_logits"
    num_queries = _core.shape_of(q, function, "q", 3)[0]
    num_keys = _core.shape_of(k, function, "k", 2)[0]
    logits = _float64(function, num_queries, num_keys)
    _core.reference.indexer_logits(q, k, weights, ks, ke, k_scale, logits)
    return logits


def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Float64Array:
    """``x / sqrt(mean(x^2) + eps) * weight + bias`` along the last dimension.

    Parameters
    ----------
    x : tensor, shape [n, dim]
    weight, bias : tensor, shape [dim]
    """
    function = "reference.rms_norm"
    out = _float64(function, *_core.shape_of(x, function, "x"))
    _core.reference.rms_norm(x, weight, bias, eps, out)
    return out


def hadamard_transform(x: Tensor, scale: float | None = None) -> Float64Array:
    """``x @ H * scale`` with ``H[i, j] = (-1) ** popcount(i & j)``.

    Parameters
    ----------
    x : tensor, shape [n, D], D a power of two
    scale : float, default D ** -0.5
    """
    function = "reference.hadamard_transform"
    shape = _core.shape_of(x, function, "x", 2)
    out = _float64(function, *shape)
    if scale is None:
        scale = max(shape[1], 1) ** -0.5
    _core.reference.hadamard_transform(x, scale, out)
    return out


def dequantize_kv_rows(rows: Tensor) -> Float64Array:
    """Rows of the FP8 cache, contiguous bytes [n, 656], as exactly the numbers they mean.

    Returns
    -------
    float64 array, shape [n, 576]
    """
    function = "reference.dequantize_kv_rows"
    out = _float64(function, _core.shape_of(rows, function, "rows", 2)[0], 576)
    _core.reference.dequantize_kv_rows(rows, out)
    return out


def _float64(function: str, *shape: int) -> Float64Array:
    result: Float64Array = empty(function, None, shape, "float64")
    return result
