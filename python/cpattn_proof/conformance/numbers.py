# SPDX-License-Identifier: Apache-2.0
"""Numbers of 32 and 16 bits, stored in wider NumPy arrays, and as text."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Spacing of each dtype at 1.
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

#: Numbers that may be flushed to zero, smaller than any normal number.
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def rounded(x: Array, dtype: str) -> Array:
    """Return the nearest numbers of a dtype, as float32.

    >>> rounded(np.array([1 + 2.0**-9]), "bfloat16"), rounded(np.array([1 + 2.0**-9]), "float16")
    (array([1.], dtype=float32), array([1.0019531], dtype=float32))
    """
    single = np.asarray(x, np.float32)
    if dtype == "float32":
        return single
    if dtype == "float16":
        return single.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(single).view(np.uint32).astype(np.uint64)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    result = even.astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(single), result, single)


def first_of(values: Array, most: int = 6) -> str:
    """Return the first of some numbers, as text.

    >>> first_of(np.arange(9), 2)
    '0, 1, ...'
    """
    return ", ".join([*map(str, values[:most]), *["..."] * (len(values) > most)])
