# SPDX-License-Identifier: Apache-2.0
"""What becomes of queries and keys before the indexer scores them."""

from __future__ import annotations

from typing import Any

from .. import _core
from .._containers import empty
from .._types import Tensor, TensorT

_CODES = ("float8_e4m3fn", "int8")
_NUMBERS = ("float32", "float16", "bfloat16")


def hadamard_transform(x: TensorT, scale: float | None = None) -> TensorT:
    """``x @ H * scale`` along the last dimension, H being the Hadamard matrix of its size.

    ``H[i, j] = (-1) ** popcount(i & j)``, which is its own transpose and, with the default scale,
    its own inverse. Sums are in float32, with one rounding at the end.

    Parameters
    ----------
    x : float32, float16 or bfloat16 tensor, shape [..., D]
        D is a power of two. Up to 6 dimensions.
    scale : float, default D ** -0.5

    Returns
    -------
    tensor like x
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
    x : float32, float16 or bfloat16 tensor, shape [..., D]
        D is a multiple of 128. Up to 6 dimensions.
    dtype : "float8_e4m3fn" or "int8"
    scale_fmt : "ue8m0" or None
        "ue8m0" rounds the scale up to a power of two; e4m3fn only.

    Returns
    -------
    codes : tensor of dtype `dtype`, shape [..., D]
    scale : float32 tensor, shape [..., D / 128]

    Notes
    -----
    A group with an infinity or NaN has scale NaN, and codes 0x7f (e4m3fn) or 0 (int8).
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
    """Write keys of the indexer into its paged cache, 132 bytes a token.

    A page holds the 128-byte codes of its tokens one after the other, then their float32 scales.
    A cache of single rows, code and scale together, is one whose pages hold one token.

    Parameters
    ----------
    cache : uint8 tensor, shape [num_pages, page_size * 132]
        Written in place.
    slots : ints, shape [num_tokens]
        ``page * page_size + offset``; -1 skips the token. Of a slot given twice the last counts.
    k : tensor, shape [num_tokens, 128] or [num_tokens, 1, 128]
        Codes (float8_e4m3fn, int8 or uint8) with `k_scale`, or numbers (float32, float16 or
        bfloat16) without, which become e4m3fn by `quantize_index`.
    k_scale : float32 tensor, num_tokens elements, optional
    scale_fmt : "ue8m0" or None
        See `quantize_index`; only without `k_scale`.

    Raises
    ------
    ValueError
        For shapes and dtypes that do not fit and slots beyond the cache; nothing is written then.
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
    cache : uint8 tensor, shape [num_pages, page_size * 132]
    slots : ints, shape [n]
        They may repeat; -1 is refused.
    dtype : "float8_e4m3fn" or "int8"
        What the codes are.

    Returns
    -------
    k : tensor of dtype `dtype`, shape [n, 128]
    k_scale : float32 tensor, shape [n, 1]
    """
    function = "read_index_k_cache"
    _check_codes(function, dtype)
    _core.shape_of(cache, function, "cache", 2)
    count = _core.index_count(slots, function, "slots")
    k = empty(function, cache, (count, 128), dtype)
    k_scale = empty(function, cache, (count, 1), "float32")
    _core.read_index_k_cache(cache, slots, k, k_scale)
    return k, k_scale
