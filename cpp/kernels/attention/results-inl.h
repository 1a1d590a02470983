// SPDX-License-Identifier: Apache-2.0
#pragma once

// The end of the loop over the keys of a row: its result is written, or its partial result
// if the keys were one part of what it sees. Needs the vector layer included first.
#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/padded_rows-inl.h"
#include "kernels/attention/softmax-inl.h"

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
  T* out = static_cast<T*>(tile.out) + token * tile.out_token_stride + head * tile.out_head_stride;
  const float* sink = tile.sinks == nullptr ? nullptr : tile.sinks + head;
  const Vector scale = splat(output_scale(state, sink) * v_factor_of_head(tile, kv_head));
  write_output(tile, output, scale, out);
  const int64_t place = token * tile.lse_token_stride + head * tile.lse_head_stride;
  if (tile.lse != nullptr) tile.lse[place] = row_lse(state);
  if (tile.max_logits != nullptr) {
    tile.max_logits[place] =
        row_max_logit(state, tile.softcap > 0 ? 1.0F : scale_of_head(tile, kv_head));
  }
}

/// The outputs of a part, [rows][v_head_dim], and behind them the states.
template <class Float>
Float* partial_output(const AttentionTile& tile, Float* partial, int64_t row) {
  return partial + row * tile.v_head_dim;
}
template <class Float>
Float* partial_state(const AttentionTile& tile, Float* partial, int64_t row) {
  const int64_t rows = int64_t{tile.num_kv_heads} * tile.num_tokens * tile.group;
  return partial + rows * tile.v_head_dim + row * kPartialState;
}

/// Writes a row, or adds it to the results of a part.
template <class T>
void finish_row(const AttentionTile& tile, int64_t row, RowState state, const float* output) {
  if (tile.partial == nullptr) return write_row<T>(tile, row, state, output);
  __builtin_memcpy(
      partial_output(tile, tile.partial, row), output, sizeof(float) * tile.v_head_dim
  );
  float* saved = partial_state(tile, tile.partial, row);
  saved[0] = state.reference;
  saved[1] = state.sum;
  saved[2] = state.maximum;
  saved[3] = state.rounding;
}

/// Merges the parts of a tile in their order; see AttentionKernel::merge.
template <class T>
void merge_parts(const AttentionTile* tile, const float* parts, int64_t num_parts) {
  const int64_t rows = int64_t{tile->num_kv_heads} * tile->num_tokens * tile->group;
  const int64_t stride = rows * (tile->v_head_dim + kPartialState);
  float merged[kMaxHeadDim];
  for (int64_t row = 0; row < rows; ++row) {
    const float* states = partial_state(*tile, parts, row);
    const float* outputs = partial_output(*tile, parts, row);
    RowState total = {-__builtin_inff(), 0.0F};
    for (int64_t i = 0; i < num_parts; ++i) {
      const float reference = states[i * stride];
      total.reference = reference > total.reference ? reference : total.reference;
    }
    for (int d = 0; d < tile->v_head_dim; d += kLanes) store(merged + d, splat(0.0F));
    float exact_sum = 0.0F;
    for (int64_t i = 0; i < num_parts; ++i) {
      const float* state = states + i * stride;
      // Equal references may both be infinite, and their difference NaN.
      const float weight =
          state[0] == total.reference ? 1.0F : shrink_by(state[0] - total.reference);
      total.sum += weight * state[1];
      exact_sum += weight * state[1] * state[3];
      total.maximum = state[2] > total.maximum ? state[2] : total.maximum;
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
