# SPDX-License-Identifier: Apache-2.0
"""Bounds on how far results may be from the oracle: the only place with such numbers.

An element of attention may be off by ``TOLERANCES[op, dtype]`` units: a unit is the dtype's spacing
eps at 1, times sum_j w_j |v_j|, to which rounding errors are proportional. The oracle is exact.
"""

from typing import NamedTuple

import numpy as np

from cpattn import active_isa

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Results below the normal numbers may be flushed to zero.
SMALLEST = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}

# A ratio of exact integers, divided in two orders with two roundings each.
RATIO = 4 * EPS["float64"]
# Bound of a float64 that is stored with twelve digits and computed again elsewhere.
STORED_DIGITS = 1e-11

# A formula counts sequences of rows, but the first and the last are cut: with a hundred items or
# more it is off by less.
SEQUENCE_ENDS = 0.01

# Rounding a result, half a unit, and a little for earlier roundings.
ROUNDED_ONCE = 0.55

TOLERANCES = {
    # The most that allowed_error() grants. Rounding the result costs half a unit. Kernels for
    # bfloat16 may also round the weights of many rows to bfloat16: at most half a unit for a single
    # weight.
    # Kernels that divide by the sum of rounded weights add the error of that sum, which may be as
    # large but averages out: the worst of 10^7 weights was off by 1.03 in all.
    ("attention", "bfloat16"): 1.05,
    ("attention", "float16"): ROUNDED_ONCE,
    # This holds for the largest scores, of 576 dimensions scaled by 1 / sqrt(192).
    ("attention", "float32"): 40,
    # Two weights have an exp and a division each, then come one sum and one rounding. In the narrow
    # dtypes only the final rounding counts.
    ("merge_state", "bfloat16"): ROUNDED_ONCE,
    ("merge_state", "float16"): ROUNDED_ONCE,
    ("merge_state", "float32"): 6,
    # Each of seven merges rounds once more.
    ("8 parts merged", "bfloat16"): 1.05 + 7 * ROUNDED_ONCE,
    # Merging up to five parts of attention in float32 adds a rounding.
    ("ring of ranks", "bfloat16"): ROUNDED_ONCE,
    ("ring of ranks", "float16"): ROUNDED_ONCE,
    ("ring of ranks", "float32"): 4 * 6,
    # Rounding the result; hadamard_units() has float32, by dimension.
    ("hadamard", "bfloat16"): ROUNDED_ONCE,
    ("hadamard", "float16"): ROUNDED_ONCE,
    ("rms_norm", "bfloat16"): ROUNDED_ONCE,
    ("rms_norm", "float16"): ROUNDED_ONCE,
    # Two products and their sum are in float32, with half a unit each.
    ("rotary", "bfloat16"): ROUNDED_ONCE,
    ("rotary", "float32"): 1,
    # Two computations in float64 order their sums differently.
    ("restated", "float64"): 64,
    # Two or three layers have float32 sums in another order, each with some roundings.
    ("logits of a model", "float32"): 100,
    # Units of the LSE are eps of float32, times its own size or that of the largest score.
    ("attention lse", "any"): 24,
    ("merge_state lse", "any"): 4,
}

# Rounding a sum costs 0.21 eps of it, root mean square. A sum of n equal numbers, added one by one,
# costs 0.21 eps sqrt(n / 3) in all: roundings are independent. Bounds are six deviations.
SUM_UNITS = 6 * 0.21

# An error e of a score is the factor 1 + e of its weight. The d products of a score are added one
# by one. The k-th sum of independent products of size a is about a sqrt(k), so all sums cost
# 0.21 eps a d / sqrt(2), where a d is |q| |k| scale: `score_size` below. If a score s is large by
# itself, its sums grow evenly, and cost 0.21 eps s sqrt(d / 3).

# At least so many keys are added up before their sum is added to the row's.
KEYS_AT_ONCE = 16

# Errors of further steps of a weight in float32: an exponential and a division. The exponential for
# the narrow dtypes is accurate to 2.9e-6, which is 24 units.
WEIGHT_UNITS = {"float32": 3, "float16": 26, "bfloat16": 26}

# Weights that are rounded to bfloat16 are off by less than half a unit, independently of each other
# and of the values: six deviations of the sum, in units of the root of sum_j (w_j v_j)^2.
ROUNDED_WEIGHTS = 6 / 12**0.5
# If they are kept in two parts, the second one is rounded, which is below 2^-7 of the weight.
REST_OF_WEIGHTS = 2.0**-7

# Least share of results, rounded once, that equal rounded float64: others are next to the middle
# between two numbers of the dtype. It was 98.8 to 99.9 % of 2,048 results for float32 sums and
# weights in two parts, over 60 seeds, and 60 % for rounded weights.
SHARE_ROUNDED_ONCE = 0.98

# Error of the logarithm of the sum of weights, computed to base 2, in units of its size.
LOGARITHM_UNITS = 2

# A capped score is s times the quotient of two polynomials in (s / c)^2. No roundings cancel: two
# of s / c and half of one of its square, which tanh passes on at most, two of each sum, one of the
# quotient, one of the product, and the error of the polynomials: in all 9.4 times half an eps of
# the capped score. The worst of 4 * 10^7 scores is off by 3.7 eps.
SOFTCAP_UNITS = 4

# A float16 number on AMX is the sum of two bfloat16 parts. The product of the second parts, each
# below 2^-8 of its number, is left out: a score is off by at most 2^-16 of |q| |k| scale, which is
# this many units of the LSE. The omitted products have either sign, so weights and their products
# with values are off by less: 2^-6 units of float16 were seen.
SPLIT_UNITS = 2.0**-16 / EPS["float32"]
SPLIT_WEIGHT_UNITS = 0.05

# Four deviations of half a unit, for the one rounding of each element of an absorbed query; these
# add up over the elements like independent numbers.
ABSORBED_UNITS = 4 / 12**0.5


def hadamard_units(dim):
    """Return the allowed error, in eps of float32 times the sum of absolute normal inputs.

    The worst case is half a unit for each of log2(dim) steps of the sum, the scale and the result.
    For inputs of either sign each step costs 0.21 sqrt(dim) of their size, and the sum of absolute
    values is 0.8 dim of it; the last two cost half of a result of four deviations.
    """
    steps = np.log2(dim)
    return min((steps + 2) / 2, (SUM_UNITS * np.sqrt(steps / dim) + 4 * dim**-0.5) / 0.8)


def rms_norm_units(dim):
    """Return the allowed error in eps of float32: of products, a quotient, a root and a sum.

    There are at least four sequential sums, and the root halves their error.
    """
    return 3 + SUM_UNITS * np.sqrt(dim / 4 / 3) / 4**0.5 / 2


def indexer_units(heads):
    """Return the allowed error, in eps of float32 times the sum of absolute normal inputs.

    A product of a query and a key errs like a score of attention: by 0.21 a d / sqrt(2), while the
    sum of absolute values is 0.64 a d. It is rounded twice more, by the weight and in the sum over
    heads. Errors of heads are independent; the scale of the key comes last.
    """
    return (SUM_UNITS / 2**0.5 / 0.64 + 1) / heads**0.5 + 0.5


def rounds_weights(dtype):
    return dtype == "bfloat16" and active_isa() in ("avx512bf16", "amx", "amx-twin", "neonbf16")


def splits_operands(dtype):
    return dtype == "float16" and active_isa() in ("amx", "amx-twin")


def to_float64(x):
    return np.asarray(x.double() if hasattr(x, "double") else x).astype(np.float64)


class Expected(NamedTuple):
    out: np.ndarray  # [tokens, heads, v_head_dim]
    lse: np.ndarray  # [tokens, heads]
    magnitude: np.ndarray  # sum_j w_j |v_j|, in the shape of out
    spread: np.ndarray  # root of sum_j (w_j v_j)^2, in the shape of out
    num_keys: np.ndarray  # keys that share the weight: 1 / sum_j w_j^2, in the shape of lse
    score_size: np.ndarray  # |q| |k| scale of the longest key, in the shape of lse
    head_dim: int

    def rows(self, index):
        return self._make(x[index] if isinstance(x, np.ndarray) else x for x in self)


def score_size(q, k, scale):
    """Bound scores of q [..., heads, dim] with keys k [..., kv_heads, dim]; NaN does not count."""
    q, k = (np.linalg.norm(to_float64(x), axis=-1) for x in (q, k))
    longest = np.nan_to_num(k, posinf=0).reshape(-1, k.shape[-1]).max(axis=0, initial=0)
    return np.nan_to_num(q, posinf=0) * np.repeat(longest, q.shape[-1] // len(longest)) * scale


def weight_units(expected, dtype):
    """Return the errors of weights without their scores', in eps of float32."""
    steps = expected.num_keys / KEYS_AT_ONCE
    return WEIGHT_UNITS[dtype] + SUM_UNITS * np.sqrt(steps / 3)


def softcap_units(expected, softcap):
    """Return the error that capping adds to the largest score, in eps of float32."""
    if not softcap:
        return np.zeros_like(expected.score_size)
    return SOFTCAP_UNITS * softcap * np.tanh(expected.score_size / softcap)


def allowed_error(expected, dtype, op="attention", softcap=0.0, rounds_values=False, precise=False):
    """Return the allowed error of each element of attention's output; with `rounds_values`, codes
    times scales of tokens are rounded to dtype, with the bound of ROUNDED_WEIGHTS; with `precise`,
    weights are not rounded.
    """
    out, magnitude = (
        np.nan_to_num(x, posinf=0, neginf=0) for x in (expected.out, expected.magnitude)
    )
    most = TOLERANCES[op, dtype] * EPS[dtype] * magnitude
    cap = softcap_units(expected, softcap)[..., None] * EPS["float32"] * magnitude
    if op == "ring of ranks":
        return allowed_error(expected, dtype, "attention", softcap) + most
    if op != "attention":
        return most + (cap if dtype == "float32" else 0)
    # Large scores have nearly all of the weight, so their common error cancels.
    units = weight_units(expected, dtype) + SUM_UNITS * expected.score_size / 2**0.5
    allowed = units[..., None] * EPS["float32"] * magnitude
    if dtype == "float32":
        return np.fmin(most, allowed) + cap
    allowed += cap + EPS[dtype] / 2 * np.abs(out)
    if splits_operands(dtype):
        allowed += SPLIT_WEIGHT_UNITS * EPS[dtype] * magnitude
    if rounds_weights(dtype):
        unit = EPS[dtype] * (REST_OF_WEIGHTS if precise else 1)
        allowed += ROUNDED_WEIGHTS * unit * expected.spread
    if rounds_values:
        allowed += ROUNDED_WEIGHTS * EPS[dtype] * expected.spread
        most = np.fmax(most, allowed)
    return np.fmin(most, allowed)


def allowed_lse_error(expected, dtype, softcap=0.0, score=None):
    """Return the allowed error of each log-sum-exp, or of the largest `score` if given."""
    score = np.abs(np.nan_to_num(expected.lse if score is None else score, posinf=0, neginf=0))
    size = np.maximum(1, score)
    roundings = np.hypot(expected.score_size / 2**0.5, score * (expected.head_dim / 3) ** 0.5)
    units = weight_units(expected, dtype) + SUM_UNITS * roundings + LOGARITHM_UNITS * size
    units = np.fmin(units, TOLERANCES["attention lse", "any"] * size)
    units += softcap_units(expected, softcap)
    if splits_operands(dtype):
        units += SPLIT_UNITS * expected.score_size
    return units * EPS["float32"]


def assert_attended(
    out, lse, expected, dtype, op="attention", softcap=0.0, rounds_values=False, precise=False
):
    """Compare attention with the oracle, and its LSE unless that is None."""
    allowed = allowed_error(expected, dtype, op, softcap, rounds_values, precise)
    assert_within(out, expected.out, allowed + SMALLEST[dtype], f"{op} in {dtype}")
    if lse is not None:
        assert_within(lse, expected.lse, allowed_lse_error(expected, dtype, softcap), "its LSE")


def share_rounded_once(actual, expected):
    """Return the share of a tensor's elements that equal float64 results rounded to its dtype."""
    return float((actual == actual.new_tensor(expected)).double().mean())


def assert_close(actual, expected, magnitude, op, dtype, units=None):
    """Compare values in units of eps times magnitude; TOLERANCES has the default of `units`."""
    dtype_of_unit = "float32" if dtype == "any" else dtype
    units = TOLERANCES[op, dtype] if units is None else units
    allowed = units * EPS[dtype_of_unit] * magnitude + SMALLEST[dtype_of_unit]
    assert_within(actual, expected, allowed, f"{op} in {dtype}")


def assert_similar(actual, expected):
    """Compare two computations in float32, in units of the largest number."""
    expected = to_float64(expected)
    size = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    assert_close(actual, expected, size, "attention", "float32")


def assert_logits_close(actual, expected):
    """Compare logits of two computations of a model in float32, in units of the largest one."""
    expected = to_float64(expected)
    assert_close(actual, expected, np.abs(expected).max(), "logits of a model", "float32")


def assert_within(actual, expected, allowed, what):
    """Compare the places of infinities and NaN, then values."""
    actual = to_float64(actual)
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    np.testing.assert_array_equal(actual[~np.isfinite(expected)], expected[~np.isfinite(expected)])
    error = np.zeros(expected.shape)
    np.subtract(actual, expected, out=error, where=np.isfinite(expected))
    error = np.abs(error)
    excess = error - allowed
    worst = np.unravel_index(np.argmax(excess), excess.shape) if excess.size else ()
    assert np.all(excess <= 0), (
        f"{what}: at {tuple(map(int, worst))} got {actual[worst]}, expected {expected[worst]}, "
        f"{error[worst] / max(allowed[worst], 1e-300):.3g} times what is "
        "allowed"
    )
