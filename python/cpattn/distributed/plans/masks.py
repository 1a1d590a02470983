# SPDX-License-Identifier: Apache-2.0
"""The mask of a batch as bits, padding tokens included."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._containers import as_numpy, tensor_of


def packed_mask(
    custom_mask: Any,
    packed_custom_mask: Any,
    extends: NDArray[np.int64],
    seq_lens: NDArray[np.int64],
    padding: int,
    call: str,
) -> NDArray[np.uint8] | None:
    """Return a copy of either mask as bits, or None without a mask.

    Padding tokens see nothing and are not seen. ValueError for two masks, another dtype or size.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None
    if custom_mask is not None and packed_custom_mask is not None:
        raise ValueError(f"{call}: give either custom_mask or packed_custom_mask, got both")
    sizes = extends * seq_lens
    if custom_mask is not None:
        flags = _values(call, "custom_mask", custom_mask, "bool", int(sizes.sum()))
        ends = np.cumsum(sizes)[:-1]
        parts = [np.packbits(part, bitorder="little") for part in np.split(flags, ends)]
    else:
        num_bytes = -(-sizes // 8)
        given = _values(
            call, "packed_custom_mask", packed_custom_mask, "uint8", int(num_bytes.sum())
        )
        parts = np.split(given, np.cumsum(num_bytes)[:-1])
    if padding:
        parts[-1] = _padded(parts[-1], int(extends[-1]), int(seq_lens[-1]), padding)
    return np.concatenate(parts)


def _values(call: str, name: str, values: Any, dtype: str, size: int) -> NDArray[Any]:
    tensor = tensor_of(values, call, name)
    try:
        array = as_numpy(tensor)
    except Exception as error:
        where = getattr(tensor, "device", type(tensor).__name__)
        raise TypeError(f"{call}: {name} must be on the CPU, got {where}") from error
    if array.dtype != dtype:
        raise ValueError(f"{call}: {name} must be {dtype}, got {array.dtype}")
    if array.size != size:
        unit = "elements" if dtype == "bool" else "bytes"
        rule = "q_len * kv_len" if dtype == "bool" else "ceil(q_len * kv_len / 8)"
        raise ValueError(f"{call}: {name} must have sum({rule}) = {size} {unit}, got {array.size}")
    return array.ravel()


def _padded(bits: NDArray[np.uint8], extend: int, length: int, padding: int) -> NDArray[np.uint8]:
    """Append `padding` tokens to the bits of a request."""
    shown = np.unpackbits(bits, count=extend * length, bitorder="little").reshape(extend, length)
    return np.packbits(np.pad(shown, ((0, padding), (0, padding))), bitorder="little")
