// SPDX-License-Identifier: Apache-2.0
#pragma once

// Running softmax of rows. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/softmax-inl.h"
#include "kernels/vector/scratch-inl.h"

namespace cpattn::kernels {
namespace {

/// The running softmax states of rows.
template <class T>
struct RowStates {
  static constexpr bool kSumsByProducts = TileFormat<T>::kSumsByProducts;

  float* sums;        // [rows], of the probabilities that P V takes
  float* exact_sums;  // [rows][16], of the probabilities before they were rounded
  float* references;  // [rows], scores; -inf before the first visible key
  float* biases;      // [rows], which make a score the exponent of its probability
  float* maxima;      // [rows][16], of the scores; if max_logits are wanted

  /// The LSE sums exact exponentials, although P V may have rounded ones.
  static bool wants_exact_sums(const AttentionTile& tile) {
    return !kSumsByProducts || tile.results.lse.data != nullptr;
  }

  void take(Carver& carver, int64_t rows) {
    carver.take(sums, rows);
    carver.take(exact_sums, rows * kLanes);
    carver.take(references, rows);
    carver.take(biases, rows);
    carver.take(maxima, rows * kLanes);
  }

  /// The states from `row` on.
  RowStates from(int64_t row) const {
    return {
        sums + row, exact_sums + row * kLanes, references + row, biases + row, maxima + row * kLanes
    };
  }

  /// Sets n rows to the state before the first key.
  void clear(const AttentionTile& tile, int64_t n) const {
    __builtin_memset(sums, 0, sizeof(float) * n);
    __builtin_memset(exact_sums, 0, sizeof(float) * n * kLanes);
    for (int64_t row = 0; row < n; ++row) {
      references[row] = -__builtin_inff();
      biases[row] = kNoBias;
      if (tile.results.max_logits != nullptr)
        store(maxima + row * kLanes, splat(-__builtin_inff()));
    }
  }

  /// The state of a row that has seen all its keys; `factor` is SoftmaxGroup's.
  RowState finished(const AttentionTile& tile, int64_t row, float factor) const {
    const float exact_sum = reduce_add(load(exact_sums + row * kLanes));
    RowState state = {
        reference_exponent(references[row], biases[row], factor),
        kSumsByProducts ? sums[row] : exact_sum
    };
    if (wants_exact_sums(tile) && state.sum > 0) state.rounding = exact_sum / state.sum;
    if (tile.results.max_logits != nullptr) state.maximum = reduce_max(load(maxima + row * kLanes));
    return state;
  }
};

}  // namespace
}  // namespace cpattn::kernels
