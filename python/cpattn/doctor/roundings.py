# SPDX-License-Identifier: Apache-2.0
"""Differences between attention and its oracle, in units of the expected rounding error."""

from __future__ import annotations

from typing import Any

import numpy as np

# Allowed error of an output element, in spacings of its dtype at 1 times the same attention over
# absolute values: it covers rounding of the result, of the weights and of the float32 sums.
_UNITS = {"float32": (40, 2.0**-23), "bfloat16": (1.05, 2.0**-7)}
DTYPES = tuple(_UNITS)


def error_in_units(
    out: np.ndarray[Any, Any],
    expected: np.ndarray[Any, Any],
    magnitude: np.ndarray[Any, Any],
    dtype: str,
) -> float:
    """Return the largest error of an output, in units of expected rounding; NaN if an error is NaN.

    magnitude : float64, as expected
        Result of the same attention over absolute values.
    """
    units, eps = _UNITS[dtype]
    return float(np.max(np.abs(out - expected) / (units * eps * magnitude + 1e-30), initial=0.0))
