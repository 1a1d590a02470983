# SPDX-License-Identifier: Apache-2.0
"""Differences between attention and its oracle, in units of what roundings explain."""

from __future__ import annotations

from typing import Any

import numpy as np

# An output element may be off by so many spacings of its dtype at 1, times what the same attention
# over absolute values gives: rounding the result, and the weights, and the sums in float32.
_UNITS = {"float32": (40, 2.0**-23), "bfloat16": (1.05, 2.0**-7)}
DTYPES = tuple(_UNITS)


def error_in_units(
    out: np.ndarray[Any, Any],
    expected: np.ndarray[Any, Any],
    magnitude: np.ndarray[Any, Any],
    dtype: str,
) -> float:
    """The largest error of an output, 1 being all that roundings explain; NaN if one is.

    magnitude : float64, as expected
        The same attention over absolute values.
    """
    units, eps = _UNITS[dtype]
    return float(np.max(np.abs(out - expected) / (units * eps * magnitude + 1e-30), initial=0.0))
