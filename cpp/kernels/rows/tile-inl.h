// SPDX-License-Identifier: Apache-2.0
#pragma once

// Properties of an AttentionTile for the loops of every instruction set.
#include "kernels/boundary/attention_kernel.h"

namespace cpattn::kernels {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// The elements of token `token` and head `head`.
template <class T, class Data>
T* row_at(const HeadRows<Data>& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
}

inline bool should_stop(const TileHooks& hooks) { return hooks.should_stop(hooks.stop_context); }

inline void mark(const TileHooks& hooks, KernelScope scope, int64_t flops = 0) {
  if (hooks.mark != nullptr) hooks.mark(hooks.mark_context, scope, flops);
}

/// Bytes of an element of K and V in memory, where elements are of type T.
template <class T>
int element_bytes(const AttentionTile& tile) {
  return tile.codes.expand != nullptr ? 1 : static_cast<int>(sizeof(T));
}

/// Bytes of a row of K in memory.
template <class T>
int64_t stored_key_bytes(const AttentionTile& tile) {
  return tile.expand != nullptr ? tile.stored_bytes : tile.nope_dim * element_bytes<T>(tile);
}

/// The factor of q . k for a KV head.
inline float scale_of_head(const AttentionTile& tile, int64_t head) {
  return tile.k_head_factors == nullptr ? tile.scale : tile.scale * tile.k_head_factors[head];
}

/// The factor of V for a KV head.
inline float v_factor_of_head(const AttentionTile& tile, int64_t head) {
  return tile.v_head_factors == nullptr ? tile.v_factor : tile.v_factor * tile.v_head_factors[head];
}

inline bool has_bias(const AttentionTile& tile) {
  const TileBias& bias = tile.bias;
  return bias.numbers != nullptr || bias.alibi_slopes != nullptr || bias.relative_bias != nullptr;
}

/// Whether a bias may be -inf, and hide a key.
inline bool bias_may_hide(const AttentionTile& tile) {
  return tile.bias.numbers != nullptr || tile.bias.relative_bias != nullptr;
}

/// The factor by which softmax multiplies scores.
inline float scale_in_softmax(const AttentionTile& tile, int64_t head) {
  return tile.softcap > 0 || has_bias(tile) ? 1.0F : scale_of_head(tile, head);
}

inline bool is_padded(const AttentionTile& tile) { return tile.stored.nope_dim > 0; }

}  // namespace
}  // namespace cpattn::kernels
