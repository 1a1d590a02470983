// SPDX-License-Identifier: Apache-2.0
#pragma once

// Only this file decides which loop of attention takes a tile. It needs no vector layer, so that
// tests on any machine can check the choice of every instruction set.
#include "kernels/rows/tile-inl.h"

namespace cpattn::kernels {
namespace {

/// Rows of a KV head that cost vectors no more than unpacking codes costs tiles.
constexpr int kLoneRows = 2;
/// The most rows of a KV head that kInPlaceTiles takes: those of one tile.
constexpr int kInPlaceTileRows = 16;
/// The most rows of a KV head that kFewRowTiles takes; kTiles is faster with more.
constexpr int kFewTileRows = 64;

/// Loops that an instruction set has for an element type, and the limit of kInPlace.
struct LoopLimits {
  /// Whether there are kTiles and kFewRowTiles, and whether there is kInPlaceTiles.
  bool tiles = false, in_place_tiles = false;
  /// The most rows of a KV head for which kInPlace is no slower than loops that pack.
  int in_place_rows = INT32_MAX;
};

/// Whether a tile is for kInPlace or kPacked: only they read padded rows and add biases.
inline bool needs_vectors(const AttentionTile& tile) { return is_padded(tile) || has_bias(tile); }

/// Whether kInPlaceTiles can take a tile: rows of whole tiles, as they are in memory.
inline bool fills_tiles(const AttentionTile& tile) {
  const int step = tile.codes.expand != nullptr ? 64 : 32;
  return !needs_vectors(tile) && tile.nope_dim % step == 0 && tile.rope_dim % step == 0 &&
         tile.v_head_dim % step == 0;
}

/// The loop for a tile.
inline AttentionLoop choose(const AttentionTile& tile, const LoopLimits& limits) {
  const int rows = tile.num_tokens * tile.group;
  if (tile.may_read_in_place) {
    const bool one_tile = rows > kLoneRows && rows <= kInPlaceTileRows;
    if (limits.in_place_tiles && one_tile && fills_tiles(tile)) return kInPlaceTiles;
    if (rows <= limits.in_place_rows) return kInPlace;
  }
  if (!limits.tiles || needs_vectors(tile)) return kPacked;
  return rows <= kFewTileRows ? kFewRowTiles : kTiles;
}

}  // namespace
}  // namespace cpattn::kernels
