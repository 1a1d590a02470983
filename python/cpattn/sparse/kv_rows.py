# SPDX-License-Identifier: Apache-2.0
"""Rows of the FP8 cache of multi-head latent attention: 656 bytes per token."""

from __future__ import annotations

import math
from typing import Any

from .. import _core
from .._containers import empty
from .._types import Tensor, TensorT

CODE_BYTES = 528  # 512 codes and 4 scales
ROW_BYTES = 656  # and 64 bfloat16 numbers


def quantize_kv_rows(nope: TensorT, rope: Tensor, *, out: TensorT | None = None) -> TensorT:
    """Quantise latent keys for the FP8 cache of multi-head latent attention.

    A row has 512 e4m3fn codes of `nope`, 4 little-endian float32 scales, one per 128 elements, and
    the 64 numbers of `rope` as bfloat16. Each group has ``scale = amax / 448`` and codes
    ``x * (1 / scale)``, in float32, rounded to nearest even.

    Parameters
    ----------
    nope : tensor [num_tokens, 512] or [num_tokens, 1, 512], float32, float16 or bfloat16
        The part of the latent without positions.
    rope : tensor [num_tokens, 64] or [num_tokens, 1, 64], of the dtype of `nope`
        The part with positions.
    out : tensor [num_tokens, 1, 656], uint8, optional
        Receives the rows and is returned.

    Returns
    -------
    tensor [num_tokens, 1, 656], uint8

    Raises
    ------
    TypeError, ValueError
        If an argument is no tensor, or dimensions, dtypes or numbers of tokens do not fit.

    Notes
    -----
    A group whose scale would be below 2^-126, such as a group of zeros, has scale 0 and zero bytes.
    A group with an infinity or NaN has scale NaN and codes 0x7f, and reads back as NaN.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> nope, rope = np.ones((3, 512), np.float32), np.ones((3, 64), np.float32)
    >>> rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    >>> rows.shape, int(rows[0, 0, 0])     # 0x7e: 448
    ((3, 1, 656), 126)
    """
    function = "quantize_kv_rows"
    shape = (*_core.shape_of(nope, function, "nope")[:1], 1, ROW_BYTES)
    if out is None:
        out = empty(function, nope, shape, "uint8")
    elif (given := _core.shape_of(out, function, "out")) != shape:
        raise ValueError(f"{function}: out must have shape {list(shape)}, got {list(given)}")
    _core.quantize_kv_rows(nope, rope, out, CODE_BYTES)
    return out


def quantize_kv_rows_separate(nope: TensorT, rope: Tensor) -> tuple[TensorT, TensorT]:
    """Quantise latent keys as `quantize_kv_rows` does, into two tensors.

    Concatenated along the last dimension, they are the rows of `quantize_kv_rows`.

    Parameters
    ----------
    nope, rope
        See `quantize_kv_rows`.

    Returns
    -------
    codes : tensor [num_tokens, 1, 528], uint8
        Codes and scales.
    rope : tensor [num_tokens, 1, 128], uint8
        The bytes of 64 bfloat16 numbers.

    Raises
    ------
    TypeError, ValueError
        See `quantize_kv_rows`.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> nope, rope = np.ones((3, 512), np.float32), np.ones((3, 64), np.float32)
    >>> parts = cpattn.sparse.quantize_kv_rows_separate(nope, rope)
    >>> rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    >>> bool((np.concatenate(parts, axis=2) == rows).all())
    True
    """
    function = "quantize_kv_rows_separate"
    tokens = _core.shape_of(nope, function, "nope")[:1]
    codes = empty(function, nope, (*tokens, 1, CODE_BYTES), "uint8")
    rope_bytes = empty(function, nope, (*tokens, 1, ROW_BYTES - CODE_BYTES), "uint8")
    _core.quantize_kv_rows_separate(nope, rope, codes, rope_bytes)
    return codes, rope_bytes


def dequantize_kv_rows(
    rows: TensorT, indices: Any = None, *, out: TensorT | None = None
) -> TensorT:
    """Read rows of the FP8 cache back as bfloat16.

    Parameters
    ----------
    rows : tensor [..., 656], uint8 or float8_e4m3fn
        Flat [num_tokens, 1, 656] or [num_tokens, 656], or paged [num_blocks, block_size, 1, 656];
        any strides with a contiguous last dimension.
    indices : ints [n], optional
        Rows to read, ``block * block_size + offset`` if paged; they may repeat. Default: all.
    out : tensor [n, 1, 576], bfloat16, optional
        Receives the result and is returned. For many rows, new memory costs more than filling it.

    Returns
    -------
    tensor [n, 1, 576], bfloat16
        ``code * scale`` in float32, rounded to nearest even, then the numbers of rope.

    Raises
    ------
    TypeError
        If `rows` is no tensor, or an index no integer.
    ImportError
        If the result is a NumPy array and ml_dtypes is missing.
    ValueError
        If width or dtype does not fit, or an index is not in the rows, -1 included.

    Examples
    --------
    >>> import numpy as np, cpattn
    >>> nope, rope = np.full((3, 512), 0.3, np.float32), np.ones((3, 64), np.float32)
    >>> rows = cpattn.sparse.quantize_kv_rows(nope, rope)
    >>> latent = cpattn.sparse.dequantize_kv_rows(rows, [2])
    >>> latent.shape, float(latent[0, 0, 0]), float(latent[0, 0, 512])  # the nearest bfloat16
    ((1, 1, 576), 0.30078125, 1.0)
    """
    function = "dequantize_kv_rows"
    shape = _core.shape_of(rows, function, "rows")
    if out is None:
        count = math.prod(shape[:-1])
        if indices is not None:
            count = _core.index_count(indices, function, "indices")
        out = empty(function, rows, (count, 1, 576), "bfloat16")
    _core.dequantize_kv_rows(rows, indices, out)
    return out
