// SPDX-License-Identifier: Apache-2.0
#pragma once

// The buffers of in_place-inl.h. Needs the vector layer and the engines included first.
#include "kernels/engines/engine-inl.h"
#include "kernels/softmax/softmax-inl.h"
#include "kernels/vector/contract-inl.h"
#include "kernels/vector/scratch-inl.h"

namespace cpattn::kernels {
namespace {

/// Keys of one block.
constexpr int kInPlaceKeys = 64;
/// Queries of one vector or more, and keys multiplied with them at once: as many as keep eight
/// sums.
constexpr int kQueryTile = 4;
constexpr int kTileVectors = 4 * kQueryTile / kLanes;
constexpr int kKeyTile = kTileVectors == 1 ? 8 : 4;

/// Buffers of one tile. The rows of a head are padded to whole tiles, and weights have kParts
/// parts.
template <class Engine, int kParts>
struct InPlaceWorkspace {
  using Operand = typename Engine::Operand;
  Operand* queries;        // [tiles of rows][quads of qk_dim][kQueryTile][quad]
  Operand* row;            // [qk_dim]
  Operand* keys;           // [kKeyTile][qk_dim]
  char* padded_keys;       // [kKeyTile][qk_dim], as stored; for padded tiles, like the next
  char* padded_values;     // [kInPlaceKeys][v_head_dim]
  float* scores;           // [rows][kInPlaceKeys]
  Operand* probabilities;  // [rows][part][kInPlaceKeys]
  float* output;           // [rows][v_head_dim]
  float* zeros;            // [v_head_dim]
  RowState* states;        // [rows]
  int64_t bytes;

  /// padded_bytes is the size of an element of K and V in padded tiles, 0 in others.
  InPlaceWorkspace(char* base, int64_t rows, int qk_dim, int v_head_dim, int padded_bytes) {
    Carver carver{base};
    carver.take(queries, rows * qk_dim);
    carver.take(row, qk_dim);
    carver.take(keys, int64_t{kKeyTile} * qk_dim);
    carver.take(padded_keys, int64_t{kKeyTile} * qk_dim * padded_bytes);
    carver.take(padded_values, int64_t{kInPlaceKeys} * v_head_dim * padded_bytes);
    carver.take(scores, rows * kInPlaceKeys);
    carver.take(probabilities, rows * kParts * kInPlaceKeys);
    carver.take(output, rows * v_head_dim);
    carver.take(zeros, v_head_dim);
    carver.take(states, rows);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
