// SPDX-License-Identifier: Apache-2.0
#pragma once

// Online softmax over rows of scores. Needs the vector layer included first.
#include "kernels/softmax/state-inl.h"

namespace cpattn::kernels {
namespace {

/// A row keeps its reference while no score exceeds it by more than 2^8: the
/// probabilities stay far inside every format, and O is rarely rescaled.
constexpr float kRescaleAbove = 8.0F;

/// The rounding error of a reference beyond this, in base-2 units, could make 2^(score - reference)
/// overflow, or vanish for all keys.
constexpr float kSteepReference = 0x1p24F;
inline bool is_steep(float reference) { return __builtin_fabsf(reference) > kSteepReference; }

/// Coefficients of 2^(r - 1/2) on [0, 1], minimax in relative error: 2.6e-6 for
/// degree 4, below half an ulp of the 16-bit formats, and 1.9e-9, below the
/// rounding of float32, for degree 6. In the middle, where the largest score of a
/// row falls, the error is smaller still. tests_cpp measures both.
template <int kDegree>
struct Exp2Polynomial;
template <>
struct Exp2Polynomial<4> {
  static constexpr float kCoefficients[] = {
      0.707108617F, 0.490027696F, 0.170725808F, 0.0367776565F, 0.00957010221F
  };
};
template <>
struct Exp2Polynomial<6> {
  static constexpr float kCoefficients[] = {0.707106769F,   0.490128934F,   0.169868141F,
                                            0.0392326489F,  0.00684397388F, 0.000879618747F,
                                            0.000153458124F};
};

/// 2^(x - 1/2) for x <= 127; 0 below the least exponent, NaN for NaN. The half costs nothing
/// where x is a sum, and lets the exponent be cut off.
template <int kDegree>
inline Vector exp2_less_half(Vector x) {
  Vector rest;
  const Vector exponent = split_exponent(x, rest);
  constexpr auto& c = Exp2Polynomial<kDegree>::kCoefficients;
  Vector p = splat(c[kDegree]);
#pragma GCC unroll 8
  for (int i = kDegree - 1; i >= 0; --i) p = fma(p, rest, splat(c[i]));
  return scale_by_power(p, exponent);
}

/// tanh(y) / y as a quotient of two polynomials in y^2, minimax in relative error on
/// [-9, 9], 2.1e-8: below the rounding of float32. Beyond 9 tanh is 1 in float32. Unlike 1 - 2 /
/// (e^2y + 1) it never cancels, and for small y it is 1 exactly.
constexpr float kTanhNumerator[] = {
    1.0F, 0.133810252F, 0.00349558843F, 2.06090863e-05F, 1.33546676e-08F
};
constexpr float kTanhDenominator[] = {
    1.0F, 0.467143416F, 0.0258769821F, 0.000328563532F, 7.77656055e-07F
};
constexpr float kTanhBound = 9.0F;

/// A polynomial with five coefficients, the constant one first.
inline Vector quartic(const float* coefficients, Vector x) {
  Vector sum = splat(coefficients[4]);
#pragma GCC unroll 4
  for (int i = 3; i >= 0; --i) sum = fma(sum, x, splat(coefficients[i]));
  return sum;
}

/// cap * tanh(scale * x / cap) of scores x [begin, end), for a cap whose inverse and ninefold
/// are normal numbers.
inline void apply_softcap(float* scores, int begin, int end, float scale, float cap) {
  const Vector bound = splat(kTanhBound * cap);
  const Vector least = splat(-kTanhBound * cap);
  const Vector inverse = splat(1.0F / cap);
  for (int j = begin; j < end; j += kLanes) {
    // min and max keep a NaN in this order.
    const Vector x = min(bound, max(least, mul(load(scores + j), splat(scale))));
    const Vector y = mul(x, inverse);
    const Vector square = mul(y, y);
    store(
        scores + j, mul(x, div(quartic(kTanhNumerator, square), quartic(kTanhDenominator, square)))
    );
  }
}

inline float row_maximum(const float* scores, int begin, int end) {
  Vector a = load(scores + begin);
  Vector b = load(scores + begin + kLanes);
  for (int j = begin + 2 * kLanes; j < end; j += 2 * kLanes) {
    a = max(a, load(scores + j));
    b = max(b, load(scores + j + kLanes));
  }
  return reduce_max(max(a, b));
}

inline bool contains_nan(const float* scores, int begin, int end) {
  bool found = false;
  for (int j = begin; j < end; ++j) found |= scores[j] != scores[j];
  return found;
}

/// The results of one pass over the scores of a row.
struct RowPass {
  float maximum;  // of the scores, without their factor
  float sum;      // of the probabilities
};

/// Probabilities 2^(factor * score - reference) of scores [begin, end). If a score exceeds the
/// reference by 2^127 the results are meaningless but harmless.
template <int kDegree, class Weights>
inline RowPass exponentiate(
    const float* scores, Weights probabilities, int begin, int end, float factor, float reference
) {
  const Vector scale = splat(factor);
  const Vector shift = splat(0.5F - reference);
  Vector sum_a = splat(0.0F);
  Vector sum_b = splat(0.0F);
  Vector maximum_a = splat(-__builtin_inff());
  Vector maximum_b = maximum_a;
  for (int j = begin; j < end; j += 2 * kLanes) {
    const Vector x = load(scores + j);
    const Vector y = load(scores + j + kLanes);
    maximum_a = max(maximum_a, x);
    maximum_b = max(maximum_b, y);
    const Vector a = exp2_less_half<kDegree>(fma(x, scale, shift));
    const Vector b = exp2_less_half<kDegree>(fma(y, scale, shift));
    sum_a = add(sum_a, a);
    sum_b = add(sum_b, b);
    store_probabilities(probabilities + j, a, b);
  }
  return {reduce_max(max(maximum_a, maximum_b)), reduce_add(add(sum_a, sum_b))};
}

/// Multiplies the sums of a row by 2^-growth.
inline void shrink_row(RowState& state, float growth, float* output, int v_head_dim) {
  const float shrink = shrink_by(-growth);
  for (int d = 0; d < v_head_dim; d += kLanes) {
    store(output + d, mul(load(output + d), splat(shrink)));
  }
  state.sum *= shrink;
}

/// softmax_row() for a steep reference. Scores are taken against the maximum before they are
/// multiplied: the products of huge scores are coarser than any exponent.
template <int kDegree, class Weights>
[[gnu::noinline]] void softmax_steep_row(
    const float* scores,
    Weights probabilities,
    int begin,
    int end,
    float factor,
    RowState& state,
    float* output,
    int v_head_dim
) {
  const float here = row_maximum(scores, begin, end);
  const float maximum = here > state.maximum ? here : state.maximum;
  const float growth = is_steep(state.reference) ? (maximum - state.maximum) * factor
                                                 : maximum * factor - state.reference;
  if (growth > 0) shrink_row(state, growth, output, v_head_dim);
  state.maximum = maximum;
  state.reference = maximum * factor;
  const Vector top = splat(maximum), scale = splat(factor), half = splat(0.5F);
  Vector sum = splat(0.0F);
  for (int j = begin; j < end; j += 2 * kLanes) {
    const Vector x = mul(sub(load(scores + j), top), scale);
    const Vector y = mul(sub(load(scores + j + kLanes), top), scale);
    const Vector a = exp2_less_half<kDegree>(add(x, half));
    const Vector b = exp2_less_half<kDegree>(add(y, half));
    sum = add(sum, add(a, b));
    store_probabilities(probabilities + j, a, b);
  }
  state.sum += reduce_add(sum);
}

/// Turns scores [begin, end) of a row into probabilities 2^(factor * score -
/// reference) and adds them to the state; `output` (v_head_dim floats) is
/// rescaled when the reference moves. begin and end are multiples of
/// kKeyGranule, so that a key's accumulator depends only on its position, and results do not depend
/// on the grouping of rows.
template <int kDegree, class Weights>
inline void softmax_row(
    const float* scores,
    Weights probabilities,
    int begin,
    int end,
    float factor,
    RowState& state,
    float* output,
    int v_head_dim
) {
  const float negative_infinity = -__builtin_inff();
  if (state.reference == negative_infinity) {
    state.reference = row_maximum(scores, begin, end) * factor;
    if (state.reference == negative_infinity) {  // nothing visible here, or NaN hidden by max()
      if (contains_nan(scores, begin, end)) state.sum = __builtin_nanf("");
      const Vector zero = splat(0.0F);
      for (int j = begin; j < end; j += 2 * kLanes) {
        store_probabilities(probabilities + j, zero, zero);
      }
      return;
    }
  }
  const auto steep = [&] {
    softmax_steep_row<kDegree>(
        scores, probabilities, begin, end, factor, state, output, v_head_dim
    );
  };
  if (is_steep(state.reference)) return steep();
  // The old reference nearly always serves, so no pass looks for the maximum first.
  RowPass pass = exponentiate<kDegree>(scores, probabilities, begin, end, factor, state.reference);
  const float top = pass.maximum * factor;
  if (is_steep(top) && top > 0) return steep();
  state.maximum = pass.maximum > state.maximum ? pass.maximum : state.maximum;
  if (top > state.reference + kRescaleAbove) {
    shrink_row(state, top - state.reference, output, v_head_dim);
    state.reference = top;
    pass = exponentiate<kDegree>(scores, probabilities, begin, end, factor, state.reference);
  }
  state.sum += pass.sum;
}

}  // namespace
}  // namespace cpattn::kernels
