// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/choose-inl.h"

#include <gtest/gtest.h>

#include <vector>

namespace cpattn::kernels {
namespace {

// The limits of vectors alone, and of AMX in its two element types.
constexpr LoopLimits kVectors{};
constexpr LoopLimits kAmxBfloat16{.tiles = true, .in_place_tiles = true, .in_place_rows = 4};
constexpr LoopLimits kAmxFloat16{.tiles = true, .in_place_rows = 16};

AttentionTile tile_of(int rows, bool may_read_in_place, int dim = 128) {
  AttentionTile tile{};
  tile.num_tokens = rows;
  tile.group = 1;
  tile.nope_dim = tile.v_head_dim = dim;
  tile.may_read_in_place = may_read_in_place;
  return tile;
}

void expand(const char* const* /*rows*/, int /*n*/, int /*dim*/, const float* /*f*/, void* /*to*/) {
}

TEST(ChooseLoop, VectorsReadInPlaceWhereTheyMay) {
  for (const int rows : {1, 16, 1000}) {
    EXPECT_EQ(choose(tile_of(rows, false), kVectors), kPacked);
    EXPECT_EQ(choose(tile_of(rows, true), kVectors), kInPlace);
  }
}

TEST(ChooseLoop, TilesThatPack) {
  for (const LoopLimits& limits : {kAmxBfloat16, kAmxFloat16}) {
    EXPECT_EQ(choose(tile_of(1, false), limits), kFewRowTiles);
    EXPECT_EQ(choose(tile_of(64, false), limits), kFewRowTiles);
    EXPECT_EQ(choose(tile_of(65, false), limits), kTiles);
    // Also where keys may be read in place, if that is slower.
    EXPECT_EQ(choose(tile_of(17, true), limits), kFewRowTiles);
    EXPECT_EQ(choose(tile_of(65, true), limits), kTiles);
  }
}

TEST(ChooseLoop, TilesInPlace) {
  EXPECT_EQ(choose(tile_of(2, true), kAmxBfloat16), kInPlace);
  EXPECT_EQ(choose(tile_of(3, true), kAmxBfloat16), kInPlaceTiles);
  EXPECT_EQ(choose(tile_of(16, true), kAmxBfloat16), kInPlaceTiles);
  EXPECT_EQ(choose(tile_of(16, true), kAmxFloat16), kInPlace);
  // Rows that do not fill tiles go to vectors, or are packed if these are slower.
  EXPECT_EQ(choose(tile_of(4, true, 80), kAmxBfloat16), kInPlace);
  EXPECT_EQ(choose(tile_of(5, true, 80), kAmxBfloat16), kFewRowTiles);
  // Tiles of codes hold 64 of them.
  AttentionTile codes = tile_of(8, true, 96);
  EXPECT_EQ(choose(codes, kAmxBfloat16), kInPlaceTiles);
  codes.codes.expand = &expand;
  EXPECT_EQ(choose(codes, kAmxBfloat16), kFewRowTiles);
  codes.nope_dim = codes.v_head_dim = 128;
  EXPECT_EQ(choose(codes, kAmxBfloat16), kInPlaceTiles);
}

TEST(ChooseLoop, TilesReadNoPaddedRowsAndAddNoBiases) {
  const float number = 0;
  AttentionTile padded = tile_of(4, true);
  padded.stored = {120, 0, 120};
  std::vector<AttentionTile> tiles = {padded};
  for (const TileBias& bias : {
           TileBias{.numbers = &number},
           TileBias{.alibi_slopes = &number},
           TileBias{.relative_bias = &number},
       }) {
    tiles.push_back(tile_of(4, true));
    tiles.back().bias = bias;
  }
  for (const LoopLimits& limits : {kVectors, kAmxBfloat16, kAmxFloat16}) {
    for (AttentionTile tile : tiles) {
      EXPECT_EQ(choose(tile, limits), kInPlace);
      tile.may_read_in_place = false;
      EXPECT_EQ(choose(tile, limits), kPacked);
    }
  }
}

}  // namespace
}  // namespace cpattn::kernels
