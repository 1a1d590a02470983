# SPDX-License-Identifier: Apache-2.0
"""The float64 oracle: operators computed directly, as a reference for tests.

Arguments are those of the functions of the same name in `cpattn`, in any container and in float64,
float32, float16 or bfloat16; caches may also hold codes. Results are new float64 NumPy arrays. The
code is C++ with Eigen and shares nothing with the kernels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from . import _core
from ._containers import empty, tensor_of
from ._types import Flags, KVScale, ScoreBias, Tensor, Window

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


# fmt: off
def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *,
    q_lens: Any, kv_lens: Any, first_positions: Any = None, block_tables: Any,
    page_size: int | None = None,
    kv_layout: Literal["NHD", "HND"] = "NHD", k_scale: KVScale = None, v_scale: KVScale = None,
    kv_dtype: str | None = None, scale: float | None = None, causal: Flags = True,
    window: Window = None, softcap: float = 0.0, bias: ScoreBias = None,
    alibi_slopes: Tensor | None = None, relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None, allow_short_kv: bool = False,
) -> tuple[Float64Array, Float64Array]:
    # fmt: on
    """Compute attention over paged keys and values.

    Tensors may differ in their dtypes, and head sizes need not be multiples of 16.

    Parameters
    ----------
    q : tensor [sum(q_lens), num_heads, head_dim]
        New tokens, sequence after sequence; num_heads is a multiple of num_kv_heads.
    k_cache, v_cache : tensors [num_pages, page_size, num_kv_heads, dim]
        With ``kv_layout="HND"`` [num_pages, num_kv_heads, page_size, dim]; 3-D with
        ``page_size`` [num_pages * page_size, num_kv_heads, dim]. The last dimension is contiguous.
        Floats, or codes: float8_e4m3fn, float8_e5m2, int8, or uint8 with `kv_dtype`.
    q_lens, kv_lens : ints [batch]
        Queries and keys of each sequence.
    first_positions, block_tables, page_size, kv_layout
        See `cpattn.paged_attention`.
    k_scale, v_scale, kv_dtype
        See `cpattn.paged_attention`; scales may have any floating dtype and go with any cache.
    scale : float, default 1/sqrt(head_dim)
        Factor of q . k, for any head_dim.
    causal, window, custom_mask : bool or bools [batch], int or pair, bools [sum(q_lens * kv_lens)]
        Key j is visible from position p if j <= p (``causal``), p - left <= j <= p + right
        (``window``, as in `cpattn.paged_attention`) and its flag in ``custom_mask`` is set.
    softcap, bias, alibi_slopes, relative_bias
        See `cpattn.paged_attention`; biases may have any floating dtype.
    sinks : tensor [num_heads], optional
        Extra logits, one for each head, in the denominator of each row.
    allow_short_kv : bool
        Whether, with `causal`, queries may outnumber keys; queries before token 0 see none.

    Returns
    -------
    out : array [sum(q_lens), num_heads, v_head_dim], float64
        Zeros for a row without visible keys. An infinite or NaN value of a visible key shows with
        any weight; under a score of -inf, `cpattn.paged_attention` gives NaN for an infinite value.
    lse : array [sum(q_lens), num_heads], float64
        Natural log-sum-exp without the sink; -inf for a row without visible keys.

    Raises
    ------
    TypeError
        If an argument is no tensor, indices are floats or bools, or a flag is no bool.
    ValueError
        If numbers are not floating-point (except codes in caches), a scale is not positive, or
        lengths, shapes, page ids or tables do not fit.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q, k, v = np.zeros((2, 1, 3)), np.zeros((1, 4, 1, 3)), np.arange(4.0).reshape(1, 4, 1, 1)
    >>> out, lse = cpattn.reference.paged_attention(
    ...     q, k, v, q_lens=[2], kv_lens=[4], block_tables=[[0]])
    >>> out.ravel(), np.exp(lse).ravel().round(9)     # means of three and of four values
    (array([1. , 1.5]), array([3., 4.]))
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
    causal_of_each = _core.flags(causal, len(q_lens), function, "causal")
    allow_short_kv = _core.flag(allow_short_kv, function, "allow_short_kv")
    may_be_short = allow_short_kv or first_positions is not None
    lens = zip(q_lens, kv_lens, causal_of_each, strict=False)
    for sequence, (q_len, kv_len, is_causal) in enumerate(lens):
        if is_causal and not may_be_short and 0 <= kv_len < q_len:
            raise ValueError(
                f"{function}: kv_lens must be at least q_lens under causal, got "
                f"{kv_len} for {q_len} at index {sequence}"
            )
    *rows, head_dim = _core.shape_of(q, function, "q", 3)
    v_head_dim = (0, *_core.shape_of(v_cache, function, "v_cache"))[-1]
    out, lse = _float64(function, *rows, v_head_dim), _float64(function, *rows)
    scale = max(head_dim, 1) ** -0.5 if scale is None else scale
    _core.reference.paged_attention(
        q, k_cache, v_cache, q_lens=q_lens, kv_lens=kv_lens, first_positions=first_positions,
        block_tables=block_tables, page_size=page_size, hnd=kv_layout == "HND", k_scale=k_scale,
        v_scale=v_scale, kv_dtype=kv_dtype, scale=scale, causal=causal_of_each, window=window,
        softcap=softcap, score_bias=(bias, alibi_slopes, relative_bias), sinks=sinks,
        custom_mask=custom_mask, out=out, lse=lse,
    )  # fmt: skip
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
    """Attend with each token to the rows of `kv` that its indices select.

    Parameters
    ----------
    q : tensor [s_q, num_heads, head_dim]
        Any head_dim.
    kv : tensor [s_kv, 1, head_dim]
        A value is the first `d_v` elements of its key. There are no pages and no FP8 rows here.
    indices : tensor [s_q, 1, topk] or [s_q, topk], int32 or int64
        Entries outside [0, s_kv) are skipped. A row that comes twice counts twice.
    sm_scale : float
        Factor of q . k.
    d_v : int
        From 0 to head_dim.
    attn_sink : tensor [num_heads], optional
        Extra logits, one for each head, in the denominator of each row.
    topk_length : ints [s_q], optional
        Number of valid entries in each row of `indices`, up to topk. Default: all.

    Returns
    -------
    out : array [s_q, num_heads, d_v], float64
        Zeros for a token without keys.
    max_logits, lse : arrays [s_q, num_heads], float64
        The largest scaled score and the natural logarithm of the sum of exponentials, without
        the sink; -inf for a token without keys.

    Raises
    ------
    TypeError
        If an argument is no tensor, or indices are neither int32 nor int64.
    ValueError
        If `q`, `kv` or `attn_sink` is not floating-point, or shapes or lengths do not fit. Indices
        are never an error.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q, kv = np.ones((2, 1, 2)), np.arange(6.0).reshape(3, 1, 2)
    >>> indices = np.array([[2, -1], [3, -1]])     # there is no row 3
    >>> out, max_logits, lse = cpattn.reference.flash_mla_sparse_fwd(q, kv, indices, 0.5, d_v=1)
    >>> out.ravel(), max_logits.ravel(), lse.ravel()
    (array([4., 0.]), array([ 4.5, -inf]), array([ 4.5, -inf]))
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
    out = _float64(function, num_tokens, num_heads, max(d_v, 0))  # the core refuses d_v < 0
    max_logits, lse = _float64(function, 2, num_tokens, num_heads)
    _core.reference.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length,
        out=out, max_logits=max_logits, lse=lse,
    )  # fmt: skip
    return out, max_logits, lse


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Float64Array, Float64Array]:
    """Merge attention over two disjoint sets of keys.

    Parameters
    ----------
    out_a, out_b : tensors [num_tokens, num_heads, head_dim]
        Normalised partial outputs.
    lse_a, lse_b : tensors [num_tokens, num_heads]
        Natural log-sum-exp; a part with -inf is ignored, whatever numbers it has.

    Returns
    -------
    out : array [num_tokens, num_heads, head_dim], float64
        New array; inputs stay unchanged, unlike in `cpattn.merge_state`. Zeros if neither part has
        keys.
    lse : array [num_tokens, num_heads], float64
        LSE of both sets; -inf if neither part has keys.

    Raises
    ------
    TypeError, ValueError
        If an argument is no tensor, shapes differ, or numbers are not floating-point.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> ones, lse = np.ones((1, 1, 2)), np.zeros((1, 1))
    >>> out, lse = cpattn.reference.merge_state(ones, lse, 5 * ones, lse + np.log(3))
    >>> out.round(9), np.exp(lse).round(9)     # (1 + 3 * 5) / 4
    (array([[[4., 4.]]]), array([[4.]]))
    """
    function = "reference.merge_state"
    out = _float64(function, *_core.shape_of(out_a, function, "out_a"))
    lse = _float64(function, *_core.shape_of(lse_a, function, "lse_a"))
    _core.reference.merge_state(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def indexer_logits(
    q: Tensor, k: Tensor, weights: Tensor, ks: Any, ke: Any, *, k_scale: Tensor | None = None
) -> Float64Array:
    """Score keys for every query as the lightning indexer does.

    Parameters
    ----------
    q : tensor [num_tokens, num_heads, head_dim]
        Any head_dim.
    k : tensor [num_keys, head_dim]
        Keys of all sequences, one after the other.
    weights : tensor [num_tokens, num_heads]
        Factor of each head.
    ks, ke : ints [num_tokens]
        Query i scores the keys from ks[i] to ke[i] - 1; none if ke[i] <= ks[i].
    k_scale : tensor [num_keys], optional
        Factor of each key.

    Returns
    -------
    logits : array [num_tokens, num_keys], float64
        k_scale[j] * sum_h weights[i, h] * max(0, q[i, h] . k[j]); -inf for other keys.

    Raises
    ------
    TypeError
        If an argument is no tensor, or `ks` or `ke` has floats or bools.
    ValueError
        If ranges exceed the keys, shapes do not fit, or numbers are not floating-point; convert
        quantised numbers first.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> q, keys, weights = np.ones((2, 1, 1)), np.array([[-1.0], [2.0], [3.0]]), np.ones((2, 1))
    >>> cpattn.reference.indexer_logits(q, keys, weights, ks=[0, 2], ke=[3, 3])
    array([[  0.,   2.,   3.],
           [-inf, -inf,   3.]])
    """
    function = "reference.indexer_logits"
    num_queries = _core.shape_of(q, function, "q", 3)[0]
    num_keys = _core.shape_of(k, function, "k", 2)[0]
    logits = _float64(function, num_queries, num_keys)
    _core.reference.indexer_logits(q, k, weights, ks, ke, k_scale, logits)
    return logits


def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Float64Array:
    """Normalise rows: ``x / sqrt(mean(x^2) + eps) * weight + bias`` along the last dimension.

    Parameters
    ----------
    x : tensor [n, dim]
        Rows to normalise.
    weight, bias : tensors [dim]
        Factor and optional summand of each column.
    eps : float
        At least 0.

    Returns
    -------
    array [n, dim], float64

    Raises
    ------
    TypeError, ValueError
        If an argument is no tensor, `eps` is no number or negative, shapes do not fit, or numbers
        are not floating-point.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> x = np.array([[3.0, 4.0]])
    >>> cpattn.reference.rms_norm(x, np.ones(2), 12.5)     # sqrt((3 * 3 + 4 * 4) / 2 + 12.5) is 5
    array([[0.6, 0.8]])
    """
    function = "reference.rms_norm"
    out = _float64(function, *_core.shape_of(x, function, "x"))
    _core.reference.rms_norm(x, weight, bias, eps, out)
    return out


def hadamard_transform(x: Tensor, scale: float | None = None) -> Float64Array:
    """Compute ``x @ H * scale`` with ``H[i, j] = (-1) ** popcount(i & j)``.

    Parameters
    ----------
    x : tensor [n, dim]
        dim is a power of two.
    scale : float, default 1/sqrt(dim)
        With the default, transforming twice gives x again, up to rounding.

    Returns
    -------
    array [n, dim], float64

    Raises
    ------
    TypeError, ValueError
        If `x` is no tensor of two dimensions, `scale` is no number, dim is no power of two, or
        numbers are not floating-point.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> cpattn.reference.hadamard_transform(np.array([[1.0, 2.0]]), scale=1.0)
    array([[ 3., -1.]])
    """
    function = "reference.hadamard_transform"
    shape = _core.shape_of(x, function, "x", 2)
    out = _float64(function, *shape)
    scale = max(shape[1], 1) ** -0.5 if scale is None else scale
    _core.reference.hadamard_transform(x, scale, out)
    return out


def dequantize_kv_rows(rows: Tensor) -> Float64Array:
    """Dequantize rows of the FP8 cache exactly.

    Parameters
    ----------
    rows : contiguous tensor [n, 656], of a dtype of one byte
        Rows, each of 512 codes of float8_e4m3fn, a float32 scale for every 128 of them, and 64
        numbers in bfloat16, as `cpattn.sparse.quantize_kv_rows` makes them.

    Returns
    -------
    array [n, 576], float64
        The 512 codes times their scales, then the 64 numbers.

    Raises
    ------
    TypeError, ValueError
        If `rows` is no tensor, has another shape or a wider dtype, or is not contiguous.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> nope, rope = np.full((1, 512), 448, np.float32), np.full((1, 64), 0.5, np.float32)
    >>> rows = cpattn.sparse.quantize_kv_rows(nope, rope)[:, 0]
    >>> cpattn.reference.dequantize_kv_rows(rows)[0, [0, 511, 512, 575]]
    array([448. , 448. ,   0.5,   0.5])
    """
    function = "reference.dequantize_kv_rows"
    out = _float64(function, _core.shape_of(rows, function, "rows", 2)[0], 576)
    _core.reference.dequantize_kv_rows(rows, out)
    return out


def _float64(function: str, *shape: int) -> Float64Array:
    result: Float64Array = empty(function, None, shape, "float64")
    return result
