// SPDX-License-Identifier: Apache-2.0
#pragma once

// Running softmax of rows, from the state before the first key to the results. Needs the vector
// layer and the tiles included first.
#include "kernels/attention/amx/softmax-inl.h"
#include "kernels/rows/visibility-inl.h"
#include "kernels/softmax/results-inl.h"
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

  /// The softmax of these rows in a block of keys; `scale` is that of their head. The caller sets
  /// what depends on the block.
  SoftmaxGroup<T> group(
      const AttentionTile& tile,
      float scale,
      float* output,  // NOLINT(readability-non-const-parameter): the group writes there
      Bfloat16* probabilities
  ) const {
    return {
        .factor = tile.softcap > 0 ? kLog2E : scale * kLog2E,
        .column_tiles = tile.v_head_dim / kLanes,
        .first_chunk = 0,
        .references = references,
        .biases = biases,
        .sums = sums,
        .exact_sums = wants_exact_sums(tile) ? exact_sums : nullptr,
        .output = output,
        .probabilities = probabilities,
    };
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

/// O += P V for a key that was packed as zeros, in those of `count` rows from `row` of a head on
/// that see it. The softmax is that of these rows; `key` counts from `first`, the first packed one.
template <class T>
[[gnu::noinline]] void add_special_value(
    const AttentionTile& tile,
    const SoftmaxGroup<T>& softmax,
    int row,
    int count,
    int64_t first,
    int key,
    const T* value
) {
  for (int i = 0; i < count; ++i) {
    if (!sees(tile.seen, (row + i) / tile.group, first + key)) continue;
    const Vector p = splat(softmax.probability_of(i, key));
    float* output = softmax.output + i * kLanes;
    for (int d = 0; d < tile.v_head_dim; d += kLanes, output += softmax.column_stride) {
      store(output, fma(p, load(value + d), load(output)));
    }
  }
}

/// Finishes row `i` of a softmax group, which is `row` of the tile.
template <class T>
void finish_row(
    const AttentionTile& tile,
    const SoftmaxGroup<T>& softmax,
    int i,
    int64_t row,
    const RowState& state
) {
  const float* output = softmax.output + i * kLanes;
  float columns[kMaxHeadDim];
  for (int d = 0; d < tile.v_head_dim; d += kLanes, output += softmax.column_stride) {
    store(columns + d, load(output));
  }
  finish_row<T>(tile, row, state, columns);
}

}  // namespace
}  // namespace cpattn::kernels
