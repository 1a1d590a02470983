// SPDX-License-Identifier: Apache-2.0
#pragma once

// The buffers of in_place-inl.h. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/row_states-inl.h"
#include "kernels/vector/scratch-inl.h"

namespace cpattn::kernels {
namespace {

/// Buffers of one tile of work, of 16 rows of each head.
struct AmxInPlaceWorkspace {
  static constexpr int kParts = TileFormat<PreciseBfloat16>::kWeightParts;
  static constexpr int64_t kWeights = int64_t{2} * kParts * 2 * kTileElements;

  Bfloat16* queries;        // [heads][depth / 32][16 pairs][16 rows][2]
  Bfloat16* keys;           // staged ones: [32 / 16][depth / 32][16][32]
  Bfloat16* values;         // staged ones: [32 / 16][v_head_dim / 32][16][32]
  Bfloat16* probabilities;  // [part][64 rows][32]
  Bfloat16* weights;        // [32 / 16][part][even, odd][16 rows][16 pairs], half of them zeros
  float* scores;            // [2 key tiles][2][16][16]
  float* output;            // [heads][v_head_dim / 32][even, odd][16 rows][16]
  RowStates<PreciseBfloat16> states;  // [heads][16]
  int64_t bytes;

  AmxInPlaceWorkspace(char* base, const AttentionTile& tile) {
    const int64_t depth = tile.nope_dim + tile.rope_dim;
    const int64_t rows = int64_t{tile.num_kv_heads} * kTileRows;
    Carver carver{base};
    carver.take(queries, rows * depth);
    carver.take(keys, kTileDepth * depth);
    carver.take(values, int64_t{kTileDepth} * tile.v_head_dim);
    carver.take(probabilities, kParts * SoftmaxGroup<PreciseBfloat16>::kPartElements);
    carver.take(weights, kWeights);
    carver.take(scores, 4 * kTileFloats);
    carver.take(output, rows * tile.v_head_dim);
    states.take(carver, rows);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
