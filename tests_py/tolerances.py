# SPDX-License-Identifier: Apache-2.0
"""How far results may be from the oracle: the only place with such numbers.

An output element is allowed ``TOLERANCES[op, dtype]`` units. A unit is the spacing eps of the
output dtype at 1, times the element's magnitude: the same attention over absolute values,
sum_j w_j |v_j|, which is what rounding errors are proportional to (the element itself may be
small by cancellation). The oracle is exact in comparison.
"""

from __future__ import annotations

import numpy as np

from cpattn import active_isa

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Results below the normal numbers may be flushed to zero.
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}

TOLERANCES = {
    # Rounding the result: half a unit. The kernels for bfloat16 may also round the weights to
    # bfloat16, another half at most; the sums, in float32, cost next to nothing here.
    ("attention", "bfloat16"): 1.05,
    ("attention", "float16"): 0.55,
    # All float32. An error e of a score is the factor 1 + e of its weight. A score of d products
    # in 4 to 16 partial sums has up to d / 8 half units of sum |q k| scale, which is 0.6 d scale
    # for normal inputs, 27 for the widest case (d = 576, scale = 1 / sqrt(192)); as the
    # roundings are independent, about the root of that many add up. exp and the sums over keys
    # stay below.
    ("attention", "float32"): 40,
    # Logits of 1e4: half an ulp of a score is 2^-11 there, which is this many units of the weight.
    ("large logits", "float32"): 4 * 2.0**12,
    ("large logits", "float16"): 4,
    ("large logits", "bfloat16"): 1.5,
    # Two weights with an exp and a division each, one sum, one rounding. In the narrow dtypes
    # the final rounding is all there is.
    ("merge_state", "bfloat16"): 0.55,
    ("merge_state", "float16"): 0.55,
    ("merge_state", "float32"): 6,
    # Each of seven merges rounds once more.
    ("8 parts merged", "bfloat16"): 1.05 + 7 * 0.55,
    # Parts that ranks attend to, merged in float32 with few roundings each, and rounded once more.
    ("ring of ranks", "bfloat16"): 1.05 + 0.55,
    ("ring of ranks", "float32"): 40 + 4 * 6,
    # In units of the sum of absolute values: half of one for each of up to 11 steps of the sum, the
    # scale and the result. In the narrow dtypes, rounding the result.
    ("hadamard", "bfloat16"): 0.55,
    ("hadamard", "float16"): 0.55,
    ("hadamard", "float32"): 6.5,
    # Rounding the result; in float32 four products, a root and a sum of squares whose relative
    # error is below (n / 64 + 8) half units on the widest vector, (n / 16 + 6) on the narrowest.
    ("rms_norm", "bfloat16"): 0.55,
    ("rms_norm", "float16"): 0.55,
    ("rms_norm", "float32"): 12,
    # In float32. A score of d <= 256 products rounds each of their sums, half a unit of sum |q k|
    # at most; as roundings are independent, about the root of d of them add up, and those of the
    # sum over heads are fewer. BFDOT may double them.
    ("indexer", "float32"): 8,
    # Units of the LSE are eps of float32, times its own size or that of the largest score.
    ("attention lse", "any"): 24,
    ("merge_state lse", "any"): 4,
}

# A capped score, computed in float32 as c - 2c / (exp(2s / c) + 1), has three roundings of numbers
# of the size of c, half a unit each, and takes half of the error of exp, two units, times c: at
# most 2.5 units of c, in the scores, so in the LSE and as a factor of the weights.
SOFTCAP_UNITS = 2.5

# float16 on AMX is the sum of two bfloat16 parts. The product of the second ones, each below 2^-8
# of its number, is left out: a score is off by 2^-16 of sum |q k| scale at most, which is this
# many units of the LSE. Of the weights it is 2^-6 units, for sums of normal inputs as in "float32".
SPLIT_UNITS = 2.0**-16 / EPS["float32"]


def splits_operands(dtype):
    return dtype == "float16" and active_isa() in ("amx", "amx-twin")


def to_float64(x):
    """A torch or NumPy tensor of any dtype as a float64 array."""
    return np.asarray(x.double() if hasattr(x, "double") else x).astype(np.float64)


def assert_close(actual, expected, magnitude, op, dtype):
    """Compare first where infinities and NaN are, then values, in the units of this module."""
    actual = to_float64(actual)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    np.testing.assert_array_equal(actual[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    error = np.abs(np.where(np.isfinite(expected), actual, 0) - np.nan_to_num(expected, neginf=0))
    dtype_of_unit = "float32" if dtype == "any" else dtype
    allowed = TOLERANCES[op, dtype] * EPS[dtype_of_unit] * magnitude + SMALLEST[dtype_of_unit]
    excess = error - allowed
    worst = np.unravel_index(np.argmax(excess), excess.shape) if excess.size else ()
    assert np.all(excess <= 0), (
        f"{op} in {dtype}: at {tuple(map(int, worst))} got {actual[worst]}, expected "
        f"{expected[worst]}, {error[worst] / max(allowed[worst], 1e-300):.3g} times what is allowed"
    )
