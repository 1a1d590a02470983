// SPDX-License-Identifier: Apache-2.0
#pragma once

// The running softmax of a row.
#include "kernels/boundary/attention_kernel.h"
#include "kernels/vector/elements-inl.h"

namespace cpattn::kernels {
namespace {

constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147181F;

/// 2^x, by which results are scaled, with the least exponent of the weights.
inline float shrink_by(float x) { return x < kLeastExponent ? 0.0F : __builtin_exp2f(x); }

/// The running softmax of a row, in base-2 units. It begins as the state before the first key.
struct RowState {
  float reference = -__builtin_inff();  // of the weights; -inf before the first visible key
  float sum = 0;                        // of 2^(score - reference)
  float maximum = -__builtin_inff();    // of the scores, without their factor
  /// Exact sums of probabilities are the rounded sums, which divide P V, times this.
  float rounding = 1;

  /// The state that save() wrote.
  static RowState loaded(const float* saved) { return {saved[0], saved[1], saved[2], saved[3]}; }
  /// Writes kPartialStateFloats floats.
  void save(float* to) const {
    static_assert(sizeof *this == kPartialStateFloats * sizeof(float));
    __builtin_memcpy(to, this, sizeof *this);
  }

  /// The natural logarithm of the sum of exponentials; -inf if the row saw nothing.
  float lse() const { return (reference + __builtin_log2f(sum * rounding)) * kLn2; }

  /// The largest score times `scale`; -inf if the row saw nothing, NaN if its sum is.
  float max_logit(float scale) const { return sum != sum ? sum : maximum * scale; }

  /// The factor of O: 1 / sum, including the logit at `sink` unless it is null. Zero for a row that
  /// saw nothing.
  float output_scale(const float* sink) const {
    if (sum == 0) return 0.0F;
    if (sink == nullptr) return 1.0F / sum;
    const float exponent = *sink * kLog2E;
    if (exponent <= reference) return 1.0F / (sum + shrink_by(exponent - reference));
    const float shrink = shrink_by(reference - exponent);
    return shrink / (sum * shrink + 1.0F);
  }
};

}  // namespace
}  // namespace cpattn::kernels
