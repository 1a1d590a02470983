# SPDX-License-Identifier: Apache-2.0
"""Bounds on the distance of a correct operator from the oracle; the tool has no others.

Unlike the bounds of this library's own tests, they fit any sensible implementation: 16-bit weights
and scores, float32 sums in any order. A unit is the spacing eps of the dtype at 1. Output errors
are proportional to sum_j w_j |v_j|, the magnitude; relative errors of a weight are absolute errors
of its score.
"""

from __future__ import annotations

import numpy as np

from .numbers import EPS, SMALLEST, Array

# Rounding the output, the weights, and the sum of the weights: half a unit each.
ROUNDINGS = 1.5

# A score is rounded to 16 bits after the product, after the scale, and after softcap or mask: three
# times half a unit of the largest score. The error is in the weight and in the sum of weights; at
# worst both add up.
SCORE_ROUNDINGS = 3 * 0.5 * 2

# Sums of float32. A rounding has 0.21 eps, root mean square; a sum of n terms, added one by one,
# has 0.21 eps sqrt(n / 3) of its size. Bounds are six deviations.
DEVIATIONS = 6 * 0.21

# Further float32 steps of a weight: a fast exponential, accurate to 24 units, a division, and
# tanh.
WEIGHT_UNITS = 32

# Largest weight, relative to the largest of its row, that may count as 0: some exponentials avoid
# subnormal numbers, which are slow.
VANISHED = 2.0**-80

# Factor of the tolerances when a result is compared with a wrong oracle: the fault makes roundings
# of sums that cancel larger than the magnitude tells.
FIT = 2.0

# The oracle with a 16-bit accumulator adds key after key; operators may add in another order, so
# only the size of the errors is compared.
ACCUMULATOR_RATIO = 4.0


def _sum_units(num_keys: Array, score_size: Array, head_dim: int) -> Array:
    """Return the errors of weights and scores in float32, by row, in units."""
    of_score = score_size * np.sqrt(head_dim / 3)
    return WEIGHT_UNITS + DEVIATIONS * (np.sqrt(num_keys / 3) + of_score)


def allowed_out(
    magnitude: Array, num_keys: Array, score_size: Array, head_dim: int, dtype: str
) -> Array:
    """Return the allowed error of each element [rows, heads, dim].

    num_keys is [rows, 1], score_size [rows, heads].
    """
    units = 2 * _sum_units(num_keys, score_size, head_dim) * EPS["float32"]
    if dtype != "float32":
        units = units + (ROUNDINGS + SCORE_ROUNDINGS * score_size) * EPS[dtype]
    vanished = VANISHED * magnitude.max(axis=-1, keepdims=True, initial=0)
    return magnitude * units[..., None] + vanished + SMALLEST[dtype]


def allowed_lse(lse: Array, num_keys: Array, score_size: Array, head_dim: int, dtype: str) -> Array:
    """Return the allowed error of each log-sum-exp in float32; scores may have been rounded."""
    size = np.maximum(1, np.abs(np.where(np.isfinite(lse), lse, 0)))
    units = (_sum_units(num_keys, score_size, head_dim) + size) * EPS["float32"]
    if dtype != "float32":
        units = units + SCORE_ROUNDINGS / 2 * score_size * EPS[dtype]
    return units
