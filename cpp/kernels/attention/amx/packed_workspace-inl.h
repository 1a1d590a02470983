// SPDX-License-Identifier: Apache-2.0
#pragma once

// The buffers of packed-inl.h. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/row_states-inl.h"
#include "kernels/attention/amx/steps-inl.h"
#include "kernels/attention/amx/tile_buffers-inl.h"

namespace cpattn::kernels {
namespace {

/// Keys packed at a time: one block, or as many as fit a quarter of a 2 MB L2 together with the
/// next ones, which are prefetched to it. Q and O of 1500 rows of head dimension 128 take half of
/// it.
template <class T>
int64_t packed_keys(int depth, int v_head_dim) {
  constexpr int64_t kBytes = 512 * 1024;
  constexpr int64_t kMaxBlocks = kMaxPackedKeys / kAmxBlockKeys<T>;
  constexpr int64_t kPackedAndNext = (TileFormat<T>::kParts + 1) * sizeof(T);
  const int64_t block_bytes = kPackedAndNext * kAmxBlockKeys<T> * (int64_t{depth} + v_head_dim);
  return kAmxBlockKeys<T> * larger(1, smaller(kMaxBlocks, kBytes / block_bytes));
}

/// Buffers of one tile of work; rows are padded to whole groups. They take at most 720 KB and, for
/// each row, its Q and O and less than 172 bytes: 1 KB for head dimension 128 in bfloat16.
template <class T>
struct AmxPackedWorkspace {
  TileBuffers<T> tiles;
  Bfloat16* queries;        // [rows / 16][part][depth / 32][16][32]
  Bfloat16* probabilities;  // [chunks][part][64][32]
  Bfloat16* ones;           // a tile whose first column sums rows; if sums are products
  float* scores;            // [2 steps][2 key tiles][2 row tiles][16][16]
  float* product;           // [64][16]
  float* output;            // [groups][v_head_dim / 16][64][16]
  RowStates<T> states;      // [rows]
  Step* steps;              // of the packed keys
  int64_t packed;           // keys at a time
  int64_t bytes;

  AmxPackedWorkspace(char* base, const AttentionTile& tile) {
    constexpr int kParts = TileFormat<T>::kParts;
    const int depth = round_up(tile.nope_dim + tile.rope_dim, kTileDepth);
    const int v_head_dim = tile.v_head_dim;
    packed = packed_keys<T>(depth, v_head_dim);
    const int64_t padded = round_up(tile.num_tokens * tile.group, kGroupRows);
    Carver carver{base};
    tiles.take(carver, packed, packed, depth, v_head_dim);
    carver.take(queries, padded * depth * kParts);
    carver.take(
        probabilities, int64_t{kAmxBlockKeys<T>} * kGroupRows * TileFormat<T>::kWeightParts
    );
    carver.take(ones, kTileElements);
    carver.take(scores, 2 * 4 * kTileFloats);
    carver.take(product, 4 * kTileFloats);
    carver.take(output, padded * v_head_dim);
    states.take(carver, padded);
    carver.take(steps, padded / kScoreRows * packed / kTileDepth);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
