// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two matrix products on tiles.
//
// Tiles 0 to 3 accumulate: four sums hide the latency of a product. 4 and 5 hold
// left-hand operands, 6 and 7 right-hand ones. Tiles are not renamed, so storing
// finished sums and starting new ones would wait for the last product: each sum is stored right
// before its tile's next use instead, by the next product. Products also leave the vector units
// idle: the caller's `slice` of other work follows each product in the instruction stream. The
// slice is always inlined, which GCC 12 would not do by itself, because a call costs as much as a
// slice.
#include "kernels/engines/amx/pack-inl.h"

namespace cpattn::kernels {
namespace {

/// The pending sums in tiles 0 to 3: the next product or flush() stores them, one tile after the
/// other. Tiles without sums are stored too.
class PendingSums {
 public:
  /// `idle` receives the contents of tiles while no sums are pending.
  explicit PendingSums(float* idle) : idle_(idle), target_(idle) {}

  /// Makes room in one tile for a new sum, which starts at zero.
  template <int kTile>
  void begin() {
    store_tile<kTile>(target_ + kTile * kTileFloats);
    clear_tile<kTile>();
  }

  void flush() {
    store_tile<0>(target_);
    store_tile<1>(target_ + kTileFloats);
    store_tile<2>(target_ + 2 * kTileFloats);
    store_tile<3>(target_ + 3 * kTileFloats);
    target_ = idle_;
  }

  /// Names the place of the sums that begin() started.
  void set_target(float* target) { target_ = target; }

 private:
  float* idle_;
  float* target_;
};

template <int kSum, int kLeft, int kRight, bool kFirst>
[[gnu::always_inline]] inline void accumulate(PendingSums& pending) {
  static_assert(kTilesHaveRoles<kSum, kLeft, kRight>);
  if constexpr (kFirst) pending.begin<kSum>();
  multiply_tiles<kSum, kLeft, kRight>();
}

template <KeySide kSide, int kRowTiles, bool kFirst, class Slice>
[[gnu::always_inline]] inline void multiply_score_tiles(
    const Bfloat16* queries,
    const Bfloat16* keys,
    int64_t stride,
    PendingSums& pending,
    Slice& slice
) {
  constexpr int kQuery = kSide == KeySide::kRight ? 4 : 6;
  constexpr int kKey = 10 - kQuery;
  const auto accumulate_tile = [&]<int kSum>() __attribute__((always_inline)) {
    constexpr int kQueries = kQuery + kSum % 2;
    constexpr int kKeys = kKey + kSum / 2;
    if constexpr (kSide == KeySide::kRight) {
      accumulate<kSum, kQueries, kKeys, kFirst>(pending);
    } else {
      accumulate<kSum, kKeys, kQueries, kFirst>(pending);
    }
    slice();
  };
  const auto leave_tile_out = [&]<int kSum>() __attribute__((always_inline)) {
    if constexpr (kFirst) {
      pending.begin<kSum>();
      slice();
    }
  };
  load_tile<kQuery>(queries);
  load_tile<kKey>(keys);
  accumulate_tile.template operator()<0>();
  if constexpr (kRowTiles == 2) {
    load_tile<kQuery + 1>(queries + stride);
    accumulate_tile.template operator()<1>();
  } else {
    leave_tile_out.template operator()<1>();
  }
  load_tile<kKey + 1>(keys + stride);
  accumulate_tile.template operator()<2>();
  if constexpr (kRowTiles == 2) {
    accumulate_tile.template operator()<3>();
  } else {
    leave_tile_out.template operator()<3>();
  }
}

/// Starts scores of 16 kRowTiles rows against 32 keys: they will be at `scores`
/// as [2 key tiles][2 row tiles][16 rows][16 keys], or, with keys on the left-hand side, as [2 key
/// tiles][2 row tiles][16 keys][16 rows], with the same bits. The first four slices are
/// `first_slice`: each comes after one more pending tile is stored.
template <KeySide kSide, int kParts, int kRowTiles, class FirstSlice, class Slice>
[[gnu::always_inline]] inline void multiply_queries(
    const Bfloat16* queries,
    const Bfloat16* keys,
    int depth,
    PendingSums& pending,
    float* scores,
    FirstSlice first_slice,
    Slice slice
) {
  const int64_t part = int64_t{depth} * kTileRows;
  const int64_t stride = part * kParts;
  const auto multiply = [&](const Bfloat16* q, const Bfloat16* k,
                            int64_t from) __attribute__((always_inline)) {
    for (int64_t d = from; d < part; d += kTileElements) {
      multiply_score_tiles<kSide, kRowTiles, false>(q + d, k + d, stride, pending, slice);
    }
  };
  multiply_score_tiles<kSide, kRowTiles, true>(queries, keys, stride, pending, first_slice);
  multiply(queries, keys, kTileElements);
  if constexpr (kParts == 2) {
    multiply(queries, keys + part, 0);
    multiply(queries + part, keys, 0);
  }
  pending.set_target(scores);
}

template <int kTile, int kRowTiles, int kRight, bool kFirst, class Slice>
[[gnu::always_inline]] inline void multiply_value_tile(
    const Bfloat16* p, PendingSums& pending, Slice& slice
) {
  if constexpr (kTile < kRowTiles) {
    constexpr int kLeft = 4 + kTile % 2;
    load_tile<kLeft>(p + kTile * kTileElements);
    accumulate<kTile, kLeft, kRight, kFirst>(pending);
    slice();
  } else if constexpr (kFirst) {
    pending.begin<kTile>();
  }
}

/// 16 kRowTiles rows of P for 32 keys, four row tiles in memory, times a tile of V.
template <int kRowTiles, int kRight, bool kFirst, class Slice>
[[gnu::always_inline]] inline void multiply_value_tiles(
    const Bfloat16* p, const Bfloat16* values, PendingSums& pending, Slice& slice
) {
  load_tile<kRight>(values);
  multiply_value_tile<0, kRowTiles, kRight, kFirst>(p, pending, slice);
  multiply_value_tile<1, kRowTiles, kRight, kFirst>(p, pending, slice);
  multiply_value_tile<2, kRowTiles, kRight, kFirst>(p, pending, slice);
  multiply_value_tile<3, kRowTiles, kRight, kFirst>(p, pending, slice);
}

/// Multiplies all parts of chunk `chunk` of P with those of V.
template <class Format, int kRowTiles, int kRight, bool kFirst, class Slice>
[[gnu::always_inline]] inline void multiply_value_chunk(
    const Bfloat16* p,
    const Bfloat16* values,
    int64_t stride,
    int chunk,
    PendingSums& pending,
    Slice& slice
) {
  p += int64_t{chunk} * Format::kWeightParts * 4 * kTileElements;
  values += chunk * stride;
  multiply_value_tiles<kRowTiles, kRight, kFirst>(p, values, pending, slice);
  if constexpr (Format::kWeightParts == 2) {
    multiply_value_tiles<kRowTiles, kRight, false>(p + 4 * kTileElements, values, pending, slice);
  }
  if constexpr (Format::kParts == 2) {
    multiply_value_tiles<kRowTiles, kRight, false>(p, values + kTileElements, pending, slice);
  }
}

/// Starts sixteen columns of P V for 16 kRowTiles rows: they will be at `product`
/// as [row tile][16 rows][16]. P is [chunk of 32 keys][part][4 row tiles][16 rows][32],
/// V is [part][16 pairs][16][2], `stride` elements from one chunk to the next. All pending sums are
/// stored before the first slice.
template <class Format, int kRowTiles, class Slice>
[[gnu::always_inline]] inline void multiply_values(
    const Bfloat16* p,
    const Bfloat16* values,
    int64_t stride,
    int chunks,
    PendingSums& pending,
    float* product,
    Slice slice
) {
  const auto no_slice = [] {};
  multiply_value_chunk<Format, kRowTiles, 6, true>(p, values, stride, 0, pending, no_slice);
  int chunk = 1;
  for (; chunk + 1 < chunks; chunk += 2) {
    multiply_value_chunk<Format, kRowTiles, 7, false>(p, values, stride, chunk, pending, slice);
    multiply_value_chunk<Format, kRowTiles, 6, false>(p, values, stride, chunk + 1, pending, slice);
  }
  if (chunk < chunks) {
    multiply_value_chunk<Format, kRowTiles, 7, false>(p, values, stride, chunk, pending, slice);
  }
  pending.set_target(product);
}

/// Starts kColumns times sixteen columns of P V for 16 kRowTiles rows, kRowTiles * kColumns being
/// at most four: they will be at `product` as [column][row tile][16 rows][16]. P is as
/// multiply_values() has it. columns[c] points to the values of column c, for the first chunk;
/// strides[c] is the distance from one chunk to the next.
template <class Format, int kRowTiles, int kColumns>
inline void multiply_value_columns(
    const Bfloat16* p,
    const Bfloat16* const* columns,
    const int64_t* strides,
    int chunks,
    PendingSums& pending,
    float* product
) {
  static_assert(kRowTiles * kColumns <= 4);
  const auto multiply =
      [&]<int kColumn, bool kFirst>(const Bfloat16* left, const Bfloat16* right)
          __attribute__((always_inline)) {
            constexpr int kRight = 6 + kColumn % 2;
            load_tile<kRight>(right);
            const auto row_tile = [&]<int kRow>() __attribute__((always_inline)) {
              if constexpr (kRow < kRowTiles) {
                constexpr int kLeft = 4 + kRow % 2;
                if (kColumn == 0 || kRowTiles > 2) load_tile<kLeft>(left + kRow * kTileElements);
                accumulate<kColumn * kRowTiles + kRow, kLeft, kRight, kFirst>(pending);
              }
            };
            row_tile.template operator()<0>();
            row_tile.template operator()<1>();
            row_tile.template operator()<2>();
            row_tile.template operator()<3>();
          };
  // One part of P with one of V, in all columns.
  const auto multiply_all =
      [&]<bool kFirst>(const Bfloat16* left, int chunk, int64_t part)
          __attribute__((always_inline)) {
            const auto column = [&]<int kColumn>() __attribute__((always_inline)) {
              if constexpr (kColumn < kColumns) {
                multiply.template operator()<kColumn, kFirst>(
                    left, columns[kColumn] + chunk * strides[kColumn] + part
                );
              }
            };
            column.template operator()<0>();
            column.template operator()<1>();
            column.template operator()<2>();
            column.template operator()<3>();
          };
  const auto multiply_chunk = [&]<bool kFirst>(int chunk) __attribute__((always_inline)) {
    const Bfloat16* left = p + int64_t{chunk} * Format::kWeightParts * 4 * kTileElements;
    multiply_all.template operator()<kFirst>(left, chunk, 0);
    if constexpr (Format::kWeightParts == 2) {
      multiply_all.template operator()<false>(left + 4 * kTileElements, chunk, 0);
    }
    if constexpr (Format::kParts == 2) {
      multiply_all.template operator()<false>(left, chunk, kTileElements);
    }
  };
  pending.flush();
  multiply_chunk.template operator()<true>(0);
  for (int chunk = 1; chunk < chunks; ++chunk) multiply_chunk.template operator()<false>(chunk);
  pending.set_target(product);
}

/// Adds up to four times sixteen columns of P V, for sixteen rows and a chunk of 32 keys, to
/// `sums`, [column][16 rows][16]; to zeros if `first`. P is as multiply_values() has it. Tiles are
/// empty before and after.
template <class Format>
inline void add_product(
    const Bfloat16* p, const Bfloat16* const* columns, int count, bool first, float* sums
) {
  const auto begin = [&]<int kColumn>() __attribute__((always_inline)) {
    if (kColumn >= count) return;
    if (first) {
      clear_tile<kColumn>();
    } else {
      load_tile<kColumn>(sums + kColumn * kTileFloats);
    }
  };
  begin.template operator()<0>();
  begin.template operator()<1>();
  begin.template operator()<2>();
  begin.template operator()<3>();
  const auto multiply = [&](const Bfloat16* left, int64_t part) __attribute__((always_inline)) {
    load_tile<4>(left);
    const auto column = [&]<int kColumn>() __attribute__((always_inline)) {
      if (kColumn >= count) return;
      constexpr int kRight = 6 + kColumn % 2;
      load_tile<kRight>(columns[kColumn] + part);
      multiply_tiles<kColumn, 4, kRight>();
    };
    column.template operator()<0>();
    column.template operator()<1>();
    column.template operator()<2>();
    column.template operator()<3>();
  };
  multiply(p, 0);
  if constexpr (Format::kWeightParts == 2) multiply(p + 4 * kTileElements, 0);
  if constexpr (Format::kParts == 2) multiply(p, kTileElements);
  const auto end = [&]<int kColumn>() __attribute__((always_inline)) {
    if (kColumn < count) store_tile<kColumn>(sums + kColumn * kTileFloats);
  };
  end.template operator()<0>();
  end.template operator()<1>();
  end.template operator()<2>();
  end.template operator()<3>();
}

/// peak_flops() for tiles: `rounds` of four products. The operands are random, because on zeros the
/// processor clocks higher than on any data.
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
