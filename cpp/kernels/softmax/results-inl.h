// SPDX-License-Identifier: Apache-2.0
#pragma once

// The end of the loop over the keys of a row: its result is written, or its partial result if the
// keys were one part of its keys. Needs the vector layer included first.
#include "kernels/boundary/attention_kernel.h"
#include "kernels/rows/padded_rows-inl.h"
#include "kernels/softmax/softmax-inl.h"

namespace cpattn::kernels {
namespace {

/// The place of row `row` of a tile, in the order (KV head, token, head of the
/// group).
struct RowPlace {
  int64_t token, head, kv_head;
};

inline RowPlace row_place(const AttentionTile& tile, int64_t row) {
  const int64_t rows_of_head = int64_t{tile.num_tokens} * tile.group;
  const int64_t kv_head = row / rows_of_head;
  return {row % rows_of_head / tile.group, kv_head * tile.group + row % tile.group, kv_head};
}

/// Writes output times scale.
template <class T>
void write_output(const AttentionTile& tile, const float* output, Vector scale, T* out) {
  const auto write = [&](T* to) {
    for (int d = 0; d < tile.v_head_dim; d += kLanes) store(to + d, mul(load(output + d), scale));
  };
  if (!is_padded(tile)) return write(out);
  T padded[kMaxHeadDim];
  write(padded);
  __builtin_memcpy(out, padded, tile.stored.v_head_dim * sizeof(T));
}

/// Normalises a row and writes it.
template <class T>
void write_row(const AttentionTile& tile, int64_t row, RowState state, const float* output) {
  const auto [token, head, kv_head] = row_place(tile, row);
  const TileResults& results = tile.results;
  const float* sink = tile.sinks == nullptr ? nullptr : tile.sinks + head;
  const Vector scale = splat(state.output_scale(sink) * v_factor_of_head(tile, kv_head));
  write_output(tile, output, scale, row_at<T>(results.out, token, head));
  if (results.lse.data != nullptr) *row_at<float>(results.lse, token, head) = state.lse();
  if (results.max_logits != nullptr) {
    const HeadRows<float> places = {
        results.max_logits, results.lse.token_stride, results.lse.head_stride
    };
    *row_at<float>(places, token, head) = state.max_logit(scale_in_softmax(tile, kv_head));
  }
}

/// The outputs of a part, [rows][v_head_dim], and after them the states.
template <class Float>
Float* partial_output(const AttentionTile& tile, Float* partial, int64_t row) {
  return partial + row * tile.v_head_dim;
}
template <class Float>
Float* partial_state(const AttentionTile& tile, Float* partial, int64_t row) {
  const int64_t rows = int64_t{tile.num_kv_heads} * tile.num_tokens * tile.group;
  return partial + rows * tile.v_head_dim + row * kPartialStateFloats;
}

/// Writes a row, or adds it to the results of a part.
template <class T>
void finish_row(const AttentionTile& tile, int64_t row, RowState state, const float* output) {
  if (tile.results.partial == nullptr) return write_row<T>(tile, row, state, output);
  __builtin_memcpy(
      partial_output(tile, tile.results.partial, row), output, sizeof(float) * tile.v_head_dim
  );
  state.save(partial_state(tile, tile.results.partial, row));
}

/// Merges the parts of a tile in their order; see AttentionKernel::merge.
template <class T>
void merge_parts(const AttentionTile* tile, const float* parts, int64_t num_parts) {
  const int64_t rows = int64_t{tile->num_kv_heads} * tile->num_tokens * tile->group;
  const int64_t stride = rows * (tile->v_head_dim + kPartialStateFloats);
  float merged[kMaxHeadDim];
  for (int64_t row = 0; row < rows; ++row) {
    const float* states = partial_state(*tile, parts, row);
    const float* outputs = partial_output(*tile, parts, row);
    RowState total;
    for (int64_t i = 0; i < num_parts; ++i) {
      const float reference = RowState::loaded(states + i * stride).reference;
      total.reference = reference > total.reference ? reference : total.reference;
    }
    for (int d = 0; d < tile->v_head_dim; d += kLanes) store(merged + d, splat(0.0F));
    float exact_sum = 0.0F;
    for (int64_t i = 0; i < num_parts; ++i) {
      const RowState state = RowState::loaded(states + i * stride);
      // Equal references may both be infinite, and their difference NaN.
      const float weight =
          state.reference == total.reference ? 1.0F : shrink_by(state.reference - total.reference);
      total.sum += weight * state.sum;
      exact_sum += weight * state.sum * state.rounding;
      total.maximum = state.maximum > total.maximum ? state.maximum : total.maximum;
      const float* output = outputs + i * stride;
      for (int d = 0; d < tile->v_head_dim; d += kLanes) {
        store(merged + d, fma(load(output + d), splat(weight), load(merged + d)));
      }
    }
    if (total.sum > 0) total.rounding = exact_sum / total.sum;
    write_row<T>(*tile, row, total, merged);
  }
}

}  // namespace
}  // namespace cpattn::kernels
