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

# Rounding the output and the weights: half a unit each, and that of the sum of the weights.
ROUNDINGS = 1.5

# A score is rounded to 16 bits after the product, after the scale, and after what caps it or adds
# the mask: three times half a unit of the largest score. It errs alike in the weight and in the sum
# of weights, which adds up at most.
SCORE_ROUNDINGS = 3 * 0.5 * 2

# Sums of float32. Rounding costs 0.21 eps, root mean square, and a sum of n terms, one after the
# other, 0.21 eps sqrt(n / 3) of its size; bounds are six deviations.
DEVIATIONS = 6 * 0.21

# Further float32 steps of a weight: an exponential to 24 units, as fast ones are, a division, and
# tanh.
WEIGHT_UNITS = 32

# Exponentials that keep clear of subnormal numbers, which are slow, take weights for 0 that are so
# small beside the largest one.
VANISHED = 2.0**-80

# A result that is held against a wrong oracle may be as far from it as from the right one, and what
# is wrong makes some roundings larger than the magnitude tells: those of sums that cancel.
FIT = 2.0

# An accumulator of 16 bits is explained by one that adds key after key; others add in another
# order, so that only the size of the errors is compared.
ACCUMULATOR_RATIO = 4.0


def _sum_units(num_keys: Array, score_size: Array, head_dim: int) -> Array:
    """Return the errors of weights and scores in float32, by row, in units."""
    of_score = score_size * np.sqrt(head_dim / 3)
    return WEIGHT_UNITS + DEVIATIONS * (np.sqrt(num_keys / 3) + of_score)


def allowed_out(
    magnitude: Array, num_keys: Array, score_size: Array, head_dim: int, dtype: str
) -> Array:
    """Return the error allowed to each element [rows, heads, dim].

    num_keys is [rows, 1], score_size [rows, heads].
    """
    units = 2 * _sum_units(num_keys, score_size, head_dim) * EPS["float32"]
    if dtype != "float32":
        units = units + (ROUNDINGS + SCORE_ROUNDINGS * score_size) * EPS[dtype]
    vanished = VANISHED * magnitude.max(axis=-1, keepdims=True, initial=0)
    return magnitude * units[..., None] + vanished + SMALLEST[dtype]


def allowed_lse(lse: Array, num_keys: Array, score_size: Array, head_dim: int, dtype: str) -> Array:
    """Return the error allowed to each log-sum-exp in float32; scores may have been rounded."""
    size = np.maximum(1, np.abs(np.where(np.isfinite(lse), lse, 0)))
    units = (_sum_units(num_keys, score_size, head_dim) + size) * EPS["float32"]
    if dtype != "float32":
        units = units + SCORE_ROUNDINGS / 2 * score_size * EPS[dtype]
    return units
