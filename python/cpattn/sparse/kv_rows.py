# SPDX-License-Identifier: Apache-2.0
"""Rows of the FP8 cache of multi-head latent attention: 656 bytes a token."""

from __future__ import annotations

import math
from typing import Any

from .. import _core
from .._containers import empty
from .._types import Tensor, TensorT

CODE_BYTES = 528  # 512 codes and 4 scales
ROW_BYTES = 656  # and 64 bfloat16 numbers


def quantize_kv_rows(nope: TensorT, rope: Tensor, *, out: TensorT | None = None) -> TensorT:
    """Quantise latent keys for the FP8 cache.

    A row is 512 e4m3fn codes of `nope`, 4 little-endian float32 scales, one per 128 elements, and
    the 64 numbers of `rope` as bfloat16. Each group has ``scale = amax / 448`` and the codes
    ``x * (1 / scale)``, in float32, rounded to nearest even.

    Parameters
    ----------
    nope : float32, float16 or bfloat16 tensor, shape [num_tokens, 512] or [num_tokens, 1, 512]
    rope : tensor of the same dtype, shape [num_tokens, 64] or [num_tokens, 1, 64]
    out : uint8 tensor, shape [num_tokens, 1, 656], optional
        Written and returned.

    Returns
    -------
    uint8 tensor, shape [num_tokens, 1, 656]

    Raises
    ------
    ValueError
        For other dimensions or dtypes, and if the numbers of tokens differ.

    Notes
    -----
    A group whose scale would be below 2^-126, such as one of zeros, has scale 0 and zero bytes.
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
    """As `quantize_kv_rows`, in two tensors that joined along the last dimension are its rows.

    Returns
    -------
    codes : uint8 tensor, shape [num_tokens, 1, 528]
        Codes and scales.
    rope : uint8 tensor, shape [num_tokens, 1, 128]
        The bytes of 64 bfloat16 numbers.
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
    rows : uint8 or float8_e4m3fn tensor, shape [..., 656]
        Flat [num_tokens, 1, 656] or [num_tokens, 656], or paged [num_blocks, block_size, 1, 656];
        any strides with a contiguous last dimension.
    indices : ints, shape [n], optional
        Rows to read, ``block * block_size + offset`` if paged; they may repeat. Default: all.
    out : bfloat16 tensor, shape [n, 1, 576], optional
        Written and returned. New memory costs more than filling it where there are many rows.

    Returns
    -------
    bfloat16 tensor, shape [n, 1, 576]
        ``code * scale`` in float32, rounded to nearest even, then the numbers of rope.

    Raises
    ------
    ValueError
        For another width or dtype, and for indices that are not there, -1 included.
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
