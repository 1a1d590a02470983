# SPDX-License-Identifier: Apache-2.0
"""Preparation of indexer queries and keys: rotation, quantisation, and the cache."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._containers import empty
from .._types import Tensor, TensorT

_CODES = ("float8_e4m3fn", "int8")
_NUMBERS = ("float32", "float16", "bfloat16")


def hadamard_transform(x: TensorT, scale: float | None = None) -> TensorT:
    """Multiply the last dimension by the Hadamard matrix of its size: ``x @ H * scale``.

    ``H[i, j] = (-1) ** popcount(i & j)`` is its own transpose and, with the default scale, its own
    inverse. Sums are in float32, with one rounding at the end.

    Parameters
    ----------
    x : tensor [..., D], float32, float16 or bfloat16
        D is a power of two. Up to 6 dimensions.
    scale : float, optional
        Default ``D ** -0.5``.

    Returns
    -------
    tensor [..., D]
        In the container and dtype of x.

    Raises
    ------
    TypeError, ValueError
        If `x` is no tensor or has another dtype, `scale` is no number, or D is no power of two.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> x = np.array([[1, 2, 3, 4]], np.float32)
    >>> y = cpattn.sparse.hadamard_transform(x)
    >>> y
    array([[ 5., -1., -2.,  0.]], dtype=float32)
    >>> cpattn.sparse.hadamard_transform(y)
    array([[1., 2., 3., 4.]], dtype=float32)
    """
    function = "hadamard_transform"
    shape = _core.shape_of(x, function, "x")
    if scale is None:
        scale = max((1, *shape[-1:])) ** -0.5
    out = empty(function, x, shape)
    _core.hadamard_transform(x, scale, out)
    return out


def quantize_index(
    x: TensorT, *, dtype: str = "float8_e4m3fn", scale_fmt: str | None = None
) -> tuple[TensorT, TensorT]:
    """Quantise queries or keys of the indexer, 128 elements at a time.

    With ``amax = max(|x|, 1e-4)`` of a group, ``scale = amax / 448`` for e4m3fn and ``amax / 127``
    for int8; codes are ``x / scale``, rounded to nearest even.

    Parameters
    ----------
    x : tensor [..., D], float32, float16 or bfloat16
        D is a multiple of 128. Up to 6 dimensions.
    dtype : str
        Dtype of the codes, ``"float8_e4m3fn"`` or ``"int8"``.
    scale_fmt : str, optional
        ``"ue8m0"`` rounds the scale up to a power of two; e4m3fn only.

    Returns
    -------
    codes : tensor [..., D], of dtype `dtype`
    scale : tensor [..., D / 128], float32

    Raises
    ------
    TypeError
        If x is no tensor, or another argument no str.
    ImportError
        If codes are e4m3fn in a NumPy array and ml_dtypes is missing.
    ValueError
        If a dtype or format is unknown, "ue8m0" meets int8, or D is no multiple of 128.

    Notes
    -----
    A group with an infinity or NaN has scale NaN, and codes 0x7f (e4m3fn) or 0 (int8).

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> x = np.linspace(-254, 254, 128, dtype=np.float32)[None]
    >>> codes, scale = cpattn.sparse.quantize_index(x, dtype="int8")
    >>> codes[0, [0, 64, 127]], scale
    (array([-127,    1,  127], dtype=int8), array([[2.]], dtype=float32))
    """
    return _quantize("quantize_index", "x", x, dtype, scale_fmt)


def _quantize(
    function: str, argument: str, x: TensorT, dtype: str, scale_fmt: str | None
) -> tuple[TensorT, TensorT]:
    _check_codes(function, dtype)
    if scale_fmt is not None and _core.text(scale_fmt, function, "scale_fmt") != "ue8m0":
        raise ValueError(f"{function}: scale_fmt must be None or 'ue8m0', got {scale_fmt!r}")
    shape = _core.shape_of(x, function, argument)
    codes = empty(function, x, shape, dtype)
    scale = empty(function, x, (*shape[:-1], *(dim // 128 for dim in shape[-1:])), "float32")
    quantize = _core.quantize_index if function == "quantize_index" else _core.quantize_index_keys
    quantize(x, scale_fmt is not None, codes, scale)
    return codes, scale


def _check_codes(function: str, dtype: str) -> None:
    if _core.text(dtype, function, "dtype") not in _CODES:
        raise ValueError(f"{function}: dtype must be one of {_CODES}, got {dtype!r}")


def write_index_k_cache(
    cache: Tensor,
    slots: Any,
    k: Tensor,
    k_scale: Tensor | None = None,
    *,
    scale_fmt: str | None = None,
) -> None:
    """Write index keys into their paged cache, 132 bytes per token.

    A page holds the 128-byte codes of its tokens, then their float32 scales. A cache of single rows
    with code and scale together is a cache with pages of one token.

    Parameters
    ----------
    cache : tensor [num_pages, page_size * 132], uint8
        Cache, written in place.
    slots : ints [num_tokens]
        ``page * page_size + offset``; -1 skips the token. The last token of a slot counts.
    k : tensor [num_tokens, 128] or [num_tokens, 1, 128]
        Codes (float8_e4m3fn, int8 or uint8) with `k_scale`, or numbers (float32, float16 or
        bfloat16) without it; numbers become e4m3fn by `quantize_index`.
    k_scale : tensor of num_tokens elements, float32, optional
        Scale of each token's codes.
    scale_fmt : str, optional
        See `quantize_index`; only without `k_scale`.

    Raises
    ------
    TypeError
        If a tensor is of another type than stated, or a slot no integer.
    ValueError
        If shapes or dtypes do not fit, or the cache lacks a slot; nothing is written then.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> cache = np.zeros((2, 4 * 132), np.uint8)           # two pages of four tokens
    >>> k = np.full((2, 128), 3, np.float32)
    >>> cpattn.sparse.write_index_k_cache(cache, [5, -1], k)
    >>> codes = cache[:, : 4 * 128].reshape(2, 4, 128)
    >>> np.flatnonzero(codes.any(axis=2))                  # the second token was skipped
    array([5])
    """
    if k_scale is None:
        k, k_scale = _quantized_keys(k, scale_fmt)
    elif scale_fmt is not None:
        raise ValueError("write_index_k_cache: scale_fmt must be None if k_scale is given")
    _core.write_index_k_cache(cache, slots, k, k_scale)


def _quantized_keys(k: Tensor, scale_fmt: str | None) -> tuple[Tensor, Tensor]:
    function = "write_index_k_cache"
    shape = _core.shape_of(k, function, "k")
    dtype = _core.dtype_of(k, function, "k")
    if dtype not in _NUMBERS:
        raise ValueError(f"{function}: k must be one of {_NUMBERS} without k_scale, got {dtype}")
    if shape[1:] not in ((128,), (1, 128)):
        raise ValueError(
            f"{function}: k must be [num_tokens, 128] or [num_tokens, 1, 128], got {list(shape)}"
        )
    return _quantize(function, "k", k, "float8_e4m3fn", scale_fmt)


def read_index_k_cache(
    cache: TensorT, slots: Any, *, dtype: str = "float8_e4m3fn"
) -> tuple[TensorT, TensorT]:
    """Gather keys that `write_index_k_cache` wrote.

    Parameters
    ----------
    cache : tensor [num_pages, page_size * 132], uint8
        Cache as in `write_index_k_cache`.
    slots : ints [n]
        Slots to read; they may repeat. -1 is refused.
    dtype : str
        Dtype of the codes, ``"float8_e4m3fn"`` or ``"int8"``.

    Returns
    -------
    k : tensor [n, 128], of dtype `dtype`
    k_scale : tensor [n, 1], float32

    Raises
    ------
    TypeError
        If `cache` is no tensor, a slot no integer, or `dtype` no str.
    ImportError
        If codes are e4m3fn in a NumPy array and ml_dtypes is missing.
    ValueError
        If the cache lacks a slot, `dtype` is unknown, or pages are no multiple of 132 bytes.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> cache = np.zeros((2, 4 * 132), np.uint8)
    >>> codes, scale = np.full((1, 128), 7, np.int8), np.array([0.5], np.float32)
    >>> cpattn.sparse.write_index_k_cache(cache, [6], codes, scale)
    >>> k, k_scale = cpattn.sparse.read_index_k_cache(cache, [6, 0], dtype="int8")
    >>> k[:, 0], k_scale[:, 0]                             # nobody wrote slot 0
    (array([7, 0], dtype=int8), array([0.5, 0. ], dtype=float32))
    """
    function = "read_index_k_cache"
    _check_codes(function, dtype)
    _core.shape_of(cache, function, "cache", 2)
    count = _core.index_count(slots, function, "slots")
    k = empty(function, cache, (count, 128), dtype)
    k_scale = empty(function, cache, (count, 1), "float32")
    _core.read_index_k_cache(cache, slots, k, k_scale)
    return k, k_scale
