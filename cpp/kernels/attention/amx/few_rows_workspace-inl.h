// SPDX-License-Identifier: Apache-2.0
#pragma once

// The buffers of few_rows-inl.h. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/row_states-inl.h"
#include "kernels/attention/amx/tile_buffers-inl.h"

namespace cpattn::kernels {
namespace {

/// Buffers of one tile of work. Those marked "of a head" exist once per KV head.
template <class T>
struct FewRowsWorkspace {
  TileBuffers<T> tiles;     // keys of two chunks, values of a block
  Bfloat16* queries;        // of a head: [rows / 16][part][depth / 32][16 pairs][16 rows][2]
  Bfloat16* probabilities;  // [chunks][part][64][32]
  Bfloat16* ones;           // a tile whose first column sums rows
  float* scores;            // [2 chunks][2 row pairs][2 key tiles][2 row tiles][16][16]
  float* product;           // [4][16][16]
  float* block_sums;        // [1 + v_head_dim / 16][16][16]: P V of a block, for 16 rows
  float* output;            // of a head: [v_head_dim / 16][64][16]
  RowStates<T> states;      // of a head: [64]
  int64_t bytes;

  FewRowsWorkspace(char* base, const AttentionTile& tile) {
    constexpr int kParts = TileFormat<T>::kParts;
    const int depth = round_up(tile.nope_dim + tile.rope_dim, kTileDepth);
    const int64_t heads = tile.num_kv_heads;
    const int64_t rows = heads * kGroupRows;
    Carver carver{base};
    tiles.take(carver, 2 * kTileDepth, kAmxBlockKeys<T>, depth, tile.v_head_dim);
    carver.take(
        queries, heads * round_up(tile.num_tokens * tile.group, kTileRows) * depth * kParts
    );
    carver.take(
        probabilities, int64_t{kAmxBlockKeys<T>} * kGroupRows * TileFormat<T>::kWeightParts
    );
    carver.take(ones, kTileElements);
    carver.take(scores, 2 * 8 * kTileFloats);
    carver.take(product, 4 * kTileFloats);
    carver.take(block_sums, int64_t{kTileFloats} * (1 + tile.v_head_dim / 16));
    carver.take(output, rows * tile.v_head_dim);
    states.take(carver, rows);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
