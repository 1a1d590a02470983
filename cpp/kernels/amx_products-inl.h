// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two matrix products on tiles. Needs amx_tiles-inl.h or amx_twin-inl.h, and
// amx_pack-inl.h, included first.
//
// Tiles 0 to 3 accumulate: four sums hide the latency of a product. 4 and 5 hold
// left-hand operands, 6 and 7 right-hand ones.

namespace cpattn::kernels {
namespace {

/// Rows whose scores are computed together, and rows of one pass over a block of V.
constexpr int kScoreRows = 2 * kTileRows;
constexpr int kGroupRows = 4 * kTileRows;

/// Scores of 16 kRowTiles rows against 32 keys, as [row tile][2][16 rows][16 keys].
template <int kRowTiles>
void multiply_queries(const Bfloat16* queries, const Bfloat16* keys, int depth, float* scores) {
  const int64_t stride = int64_t{depth} * kTileRows;
  clear_tile<0>();
  clear_tile<1>();
  if constexpr (kRowTiles == 2) {
    clear_tile<2>();
    clear_tile<3>();
  }
  for (int64_t k = 0; k < stride; k += kTileElements) {
    load_tile<4>(queries + k);
    load_tile<6>(keys + k);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(keys + stride + k);
    multiply_tiles<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      load_tile<5>(queries + stride + k);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
  }
  store_tile<0>(scores);
  store_tile<1>(scores + kTileFloats);
  if constexpr (kRowTiles == 2) {
    store_tile<2>(scores + 2 * kTileFloats);
    store_tile<3>(scores + 3 * kTileFloats);
  }
}

/// Sixteen columns of P V for 16 kRowTiles rows, as [row tile][16 rows][16]. P is
/// [chunk of 32 keys][4 row tiles][16 rows][32]; V is [chunk][16 pairs][16][2].
template <int kRowTiles>
void multiply_values(const Bfloat16* p, const Bfloat16* values, int chunks, float* product) {
  clear_tile<0>();
  if constexpr (kRowTiles > 1) clear_tile<1>();
  if constexpr (kRowTiles > 2) clear_tile<2>();
  if constexpr (kRowTiles > 3) clear_tile<3>();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    load_tile<6>(values);
    load_tile<4>(p);
    multiply_tiles<0, 4, 6>();
    if constexpr (kRowTiles > 1) {
      load_tile<5>(p + kTileElements);
      multiply_tiles<1, 5, 6>();
    }
    if constexpr (kRowTiles > 2) {
      load_tile<4>(p + 2 * kTileElements);
      multiply_tiles<2, 4, 6>();
    }
    if constexpr (kRowTiles > 3) {
      load_tile<5>(p + 3 * kTileElements);
      multiply_tiles<3, 5, 6>();
    }
    p += 4 * kTileElements;
    values += kTileElements;
  }
  store_tile<0>(product);
  if constexpr (kRowTiles > 1) store_tile<1>(product + kTileFloats);
  if constexpr (kRowTiles > 2) store_tile<2>(product + 2 * kTileFloats);
  if constexpr (kRowTiles > 3) store_tile<3>(product + 3 * kTileFloats);
}

/// As peak_flops of the other engines: `rounds` of four products. The operands
/// are random, because on zeros the processor clocks higher than on any data.
inline int64_t tile_peak_flops(int64_t rounds) {
  const TileScope tiles;
  alignas(64) uint16_t operands[4][kTileElements];
  uint32_t random = 1;
  for (auto& tile : operands) {
    for (uint16_t& element : tile) {
      random = random * 1664525 + 1013904223;
      element = static_cast<uint16_t>((random >> 16 & 0x807f) | 0x3f80);  // +-[1, 2)
    }
  }
  load_tile<4>(operands[0]);
  load_tile<5>(operands[1]);
  load_tile<6>(operands[2]);
  load_tile<7>(operands[3]);
  for (int64_t round = 0; round < rounds; ++round) {
    multiply_tiles<0, 4, 6>();
    multiply_tiles<1, 4, 7>();
    multiply_tiles<2, 5, 6>();
    multiply_tiles<3, 5, 7>();
  }
  return rounds * 4 * (2 * kTileRows * 16 * kTileDepth);
}

}  // namespace
}  // namespace cpattn::kernels
