// SPDX-License-Identifier: Apache-2.0
#pragma once

// Buffers of tiles. Needs the vector layer and the tiles included first.
#include "kernels/engines/amx/pack-inl.h"
#include "kernels/vector/scratch-inl.h"

namespace cpattn::kernels {
namespace {

/// Buffers in which keys and values become tiles.
template <class T>
struct TileBuffers {
  Bfloat16* keys;    // [keys / 16][part][depth / 32][16][16][2]
  Bfloat16* values;  // [block][v_head_dim / 16][chunks][part][16][16][2]
  T* zeros;          // [v_head_dim]
  T* expanded;       // [32][depth + v_head_dim], rows of keys and values

  void take(Carver& carver, int64_t num_keys, int64_t num_values, int depth, int v_head_dim) {
    constexpr int kParts = TileFormat<T>::kParts;
    carver.take(keys, num_keys * depth * kParts);
    carver.take(values, num_values * v_head_dim * kParts);
    carver.take(zeros, v_head_dim);
    carver.take(expanded, int64_t{kTileDepth} * (depth + v_head_dim));
    if (carver.base != nullptr) __builtin_memset(zeros, 0, sizeof(T) * v_head_dim);
  }
};

/// A tile whose first column is ones: it sums rows.
inline void fill_ones(Bfloat16* tile) {
  constexpr uint32_t kPairOfOnes = 0x3f803f80;
  __builtin_memset(tile, 0, sizeof(Bfloat16) * kTileElements);
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    __builtin_memcpy(tile + pair * kTileDepth, &kPairOfOnes, sizeof kPairOfOnes);
  }
}

}  // namespace
}  // namespace cpattn::kernels
