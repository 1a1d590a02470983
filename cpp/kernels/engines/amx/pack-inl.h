// SPDX-License-Identifier: Apache-2.0
#pragma once

// Queries, keys and values as tiles. Like every file that includes it, this needs
// vector/avx512-inl.h and tiles-inl.h or twin-inl.h included first.
//
// A left-hand tile is 16 rows of 32 elements. A right-hand tile has 16 columns
// and 32 rows of the matrix, two of them interleaved to a row of 16 pairs. If an element has two
// parts (format-inl.h), a run of tiles has them too: all first parts, then all rests.
#include "kernels/boundary/attention_kernel.h"
#include "kernels/engines/amx/format-inl.h"
#include "kernels/engines/gemm_bf16-inl.h"
#include "kernels/rows/key_rows-inl.h"

namespace cpattn::kernels {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                         // elements of a product's sum
constexpr int kTileElements = kTileRows * kTileDepth;  // bfloat16
constexpr int kTileFloats = kTileRows * 16;
/// Rows whose scores are computed together, and rows of one pass over a block of V.
constexpr int kScoreRows = 2 * kTileRows;
constexpr int kGroupRows = 4 * kTileRows;
/// Keys of a block, multiplied together: P of 64 rows takes two thirds of L1.
template <class T>
constexpr int kAmxBlockKeys = 256 / TileFormat<T>::kWeightParts;
template <class T>
constexpr int kAmxChunks = kAmxBlockKeys<T> / kTileDepth;
/// The most keys that are packed at a time.
constexpr int kMaxPackedKeys = 1024;

/// The side of products on which keys stand: the right one, as columns, or the left one, as rows
/// in the place of queries.
enum class KeySide { kRight, kLeft };

/// The roles of tiles. Sums are in tiles 0 to 3, and stay there from one product to the next.
/// Operands are in tiles 4 to 7, and stay there until the next packing call at most, which
/// multiplies into one of them: loops load their operands again after it.
constexpr int kFirstOperandTile = 4;
template <int kSum, int kLeft, int kRight>
constexpr bool kTilesHaveRoles =
    kSum < kFirstOperandTile && kLeft >= kFirstOperandTile && kRight >= kFirstOperandTile;

/// The tile unit falls asleep after 300 ns without a product and is slow to wake. Long vector work
/// calls this every few hundred cycles. It overwrites an operand.
inline void keep_tiles_awake() {
  constexpr int kOverwritten = 5;
  static_assert(kOverwritten >= kFirstOperandTile, "sums survive packing");
  multiply_tiles<kOverwritten, 4, 6>();
}

/// The largest magnitude among 16-bit elements, as bits: floats compare like these.
class Magnitude {
 public:
  void add(__m512i elements) {
    largest_ = _mm512_max_epu16(largest_, _mm512_and_si512(elements, _mm512_set1_epi16(0x7fff)));
  }
  /// Whether all were below the element of these bits.
  bool below(int16_t bits) const {
    return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(bits)) == 0;
  }

 private:
  __m512i largest_ = _mm512_setzero_si512();
};

/// 2^58 in bfloat16. Sums of up to 576 products of smaller elements are finite.
constexpr int16_t kBoundOfFiniteScores = 0x5c80;

/// Puts `dim` elements of a row into left-hand tiles [part][depth / 32][16 rows][32],
/// from dimension `first` on; both multiples of 16.
template <class T>
inline void pack_tile_row(
    const T* source, int dim, int first, int row, int depth, Bfloat16* tiles, Magnitude& magnitude
) {
  constexpr int kParts = TileFormat<T>::kParts;
  for (int d = 0; d < dim; d += 16) {
    const int to = first + d;
    Bfloat16* cell = tiles + to / kTileDepth * kTileElements + row * kTileDepth + to % kTileDepth;
    const __m512i elements =
        _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + d)));
    magnitude.add(elements);
    __m512i parts[kParts];
    TileFormat<T>::split(elements, parts);
    for (int part = 0; part < kParts; ++part, cell += int64_t{kTileRows} * depth) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(cell), _mm512_castsi512_si256(parts[part]));
    }
  }
}

/// A row that stands for missing keys.
constexpr char kZeroRow[2 * kMaxHeadDim] = {};

/// Four 32-bit elements of sixteen rows, `offset` bytes into each: columns[i] holds
/// element i of every row. Half of the transpose is done by the loads.
inline void load_columns(const char* const* rows, int offset, __m512i* columns) {
  __m512i x[4];
  for (int i = 0; i < 4; ++i) {
    const auto quarter = [&](int row) __attribute__((always_inline)) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + offset));
    };
    __m512i sixteen_bytes = _mm512_castsi128_si512(quarter(i));
    sixteen_bytes = _mm512_inserti32x4(sixteen_bytes, quarter(i + 4), 1);
    sixteen_bytes = _mm512_inserti32x4(sixteen_bytes, quarter(i + 8), 2);
    x[i] = _mm512_inserti32x4(sixteen_bytes, quarter(i + 12), 3);
  }
  const __m512i low01 = _mm512_unpacklo_epi32(x[0], x[1]);
  const __m512i high01 = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i low23 = _mm512_unpacklo_epi32(x[2], x[3]);
  const __m512i high23 = _mm512_unpackhi_epi32(x[2], x[3]);
  columns[0] = _mm512_unpacklo_epi64(low01, low23);
  columns[1] = _mm512_unpackhi_epi64(low01, low23);
  columns[2] = _mm512_unpacklo_epi64(high01, high23);
  columns[3] = _mm512_unpackhi_epi64(high01, high23);
}

/// Packs rows[0..n) as columns, `dim` dimensions from `first` on, into
/// [part][depth / 32][16 pairs][16 rows][2]. Rows from n up to 16 are zeros.
template <class T>
inline void pack_tile_columns(
    const char* const* rows,
    int n,
    int dim,
    int first,
    int depth,
    Bfloat16* tiles,
    Magnitude& magnitude
) {
  constexpr int kParts = TileFormat<T>::kParts;
  const char* rows16[16];
  for (int i = 0; i < 16; ++i) rows16[i] = i < n ? rows[i] : kZeroRow;
  for (int d = 0; d < dim; d += 32) {
    if (d * kParts % 128 == 0) keep_tiles_awake();
    const bool half = dim - d < 32;
    Bfloat16* cell = tiles + (first + d) / 2 * kTileDepth;
    for (int quarter = 0; quarter < (half ? 2 : 4); ++quarter) {
      __m512i pairs[4];
      load_columns(rows16, (d + quarter * 8) * 2, pairs);
      for (int i = 0; i < 4; ++i, cell += kTileDepth) {
        magnitude.add(pairs[i]);
        __m512i parts[kParts];
        TileFormat<T>::split(pairs[i], parts);
        for (int part = 0; part < kParts; ++part) {
          _mm512_store_si512(cell + int64_t{part} * kTileRows * depth, parts[part]);
        }
      }
    }
  }
}

/// Packs the queries of a KV head as columns, into [rows / 16][part][depth / 32][16 pairs][16 rows]
/// [2]. Dimensions from theirs up to `depth` stay unchanged.
template <class T>
inline void pack_query_columns(
    const AttentionTile& tile, int kv_head, int depth, Bfloat16* tiles, Magnitude& magnitude
) {
  const int num_rows = tile.num_tokens * tile.group;
  const int64_t first_head = int64_t{kv_head} * tile.group;
  const auto pack = [&](const HeadRows<const void>& source, int dim, int first) {
    for (int row = 0; row < num_rows; row += kTileRows) {
      const char* rows[kTileRows];
      const int n = static_cast<int>(smaller(kTileRows, num_rows - row));
      for (int i = 0; i < n; ++i) {
        const int64_t token = (row + i) / tile.group;
        const int64_t head = first_head + (row + i) % tile.group;
        rows[i] = reinterpret_cast<const char*>(row_at<const T>(source, token, head));
      }
      Bfloat16* columns = tiles + int64_t{row} * depth * TileFormat<T>::kParts;
      pack_tile_columns<T>(rows, n, dim, first, depth, columns, magnitude);
    }
  };
  pack(tile.q, tile.nope_dim, 0);
  if (tile.rope_dim > 0) pack(tile.q_rope, tile.rope_dim, tile.nope_dim);
}

/// Packs keys rows[0..n) as columns, `dim` dimensions from `first` on, into
/// [16 keys][part][depth / 32][16 pairs][16 keys][2]. Keys up to the next multiple of 32
/// are zeros.
template <class T>
inline void pack_tile_keys(
    const char* const* rows,
    int n,
    int dim,
    int first,
    int depth,
    Bfloat16* tiles,
    Magnitude& magnitude
) {
  constexpr int kParts = TileFormat<T>::kParts;
  for (int key = 0; key < n || key % kTileDepth != 0; key += 16) {
    pack_tile_columns<T>(
        rows + key, static_cast<int>(smaller(n - key, 16)), dim, first, depth,
        tiles + int64_t{key} * depth * kParts, magnitude
    );
  }
}

/// Loads kColumns times 32 elements of four rows, from `offset` bytes on: all of them before
/// anything is stored. A load after a store whose address has the same last twelve bits, as is
/// common for rows of a cache, waits twice as long as all the rest takes.
template <int kColumns>
[[gnu::always_inline]] inline void load_four_rows(
    const char* const* rows, int offset, __m512i (&x)[4][kColumns]
) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) x[i][j] = _mm512_loadu_si512(rows[i] + offset + j * 64);
  }
}

/// Puts `dim` elements of kRows rows, from dimension `first` on, into left-hand tiles
/// [16 rows][part][depth / 32][16][32]. Calls each() after every four rows.
template <class T, int kRows = 2 * kTileRows, class Each>
inline void pack_tile_rows(
    const char* const* rows,
    int dim,
    int first,
    int depth,
    Bfloat16* tiles,
    Magnitude& magnitude,
    Each each
) {
  constexpr int kParts = TileFormat<T>::kParts;
  const int64_t part_elements = int64_t{kTileRows} * depth;
  const bool whole = dim % 32 == 0 && first % 32 == 0;
  for (int row = 0; row < kRows; row += 4) {
    Bfloat16* cells = tiles + row / kTileRows * part_elements * kParts;
    const auto place = [&]<int kColumns>(int d) __attribute__((always_inline)) {
      __m512i x[4][kColumns];
      load_four_rows(rows + row, d * 2, x);
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < kColumns; ++j) {
          magnitude.add(x[i][j]);
          __m512i parts[kParts];
          TileFormat<T>::split(x[i][j], parts);
          Bfloat16* cell = cells + (first + d + j * 32) / kTileDepth * kTileElements +
                           (row + i) % kTileRows * kTileDepth;
          for (int part = 0; part < kParts; ++part) {
            _mm512_store_si512(cell + part * part_elements, parts[part]);
          }
        }
      }
    };
    if (whole) {
      int d = 0;
      for (; d + 128 <= dim; d += 128) place.template operator()<4>(d);
      for (; d < dim; d += 32) place.template operator()<1>(d);
    } else {
      for (int i = row; i < row + 4; ++i) {
        const T* source = reinterpret_cast<const T*>(rows[i]);
        pack_tile_row(source, dim, first, i % kTileRows, depth, cells, magnitude);
      }
    }
    each();
  }
}

/// Packs up to 32 values rows[0..n) as rows into [dim / 16][part][16 pairs of keys][16
/// dimensions][2], column tiles being `column_stride` elements apart, the keys in the order of
/// their probabilities; keys after the last are zeros. Lists the keys that hold an infinity or NaN;
/// returns their number. Calls each() after every four keys.
template <class T, class Each>
inline int pack_tile_values(
    const char* const* rows,
    int n,
    int dim,
    Bfloat16* tiles,
    int64_t column_stride,
    int* not_finite,
    Each each
) {
  constexpr int kParts = TileFormat<T>::kParts;
  // unpack works within quarters: this order of 64-bit words makes it take the
  // first sixteen dimensions, then the last.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  int count = 0;
  for (int key = 0; key < kTileDepth; key += 4) {
    const char* four[4];
    for (int i = 0; i < 4; ++i) four[i] = key + i < n ? rows[key + i] : kZeroRow;
    Magnitude magnitudes[4];
    const auto place_pair = [&](int pair, __m512i even, __m512i odd, int d,
                                bool whole) __attribute__((always_inline)) {
      magnitudes[2 * pair].add(even);
      magnitudes[2 * pair + 1].add(odd);
      __m512i x[2][kParts];
      TileFormat<T>::split(_mm512_permutexvar_epi64(order, even), x[0]);
      TileFormat<T>::split(_mm512_permutexvar_epi64(order, odd), x[1]);
      Bfloat16* cell = tiles + d / 16 * column_stride + TileFormat<T>::word_of(key + 2 * pair) * 16;
      for (int part = 0; part < kParts; ++part, cell += kTileElements) {
        _mm512_store_si512(cell, _mm512_unpacklo_epi16(x[0][part], x[1][part]));
        if (!whole) continue;
        _mm512_store_si512(cell + column_stride, _mm512_unpackhi_epi16(x[0][part], x[1][part]));
      }
    };
    keep_tiles_awake();
    int d = 0;
    for (; d + 128 <= dim; d += 128) {
      __m512i x[4][4];
      load_four_rows(four, d * 2, x);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        place_pair(0, x[0][j], x[1][j], d + j * 32, true);
        place_pair(1, x[2][j], x[3][j], d + j * 32, true);
      }
    }
    for (; d < dim; d += 32) {
      const bool whole = dim - d >= 32;
      const __mmask8 present = whole ? 0xff : 0x0f;
      __m512i x[4];
      for (int i = 0; i < 4; ++i) x[i] = _mm512_maskz_loadu_epi64(present, four[i] + d * 2);
      place_pair(0, x[0], x[1], d, whole);
      place_pair(1, x[2], x[3], d, whole);
    }
    for (int i = 0; i < 4; ++i) {
      if (!magnitudes[i].below(TileFormat<T>::kInfinity)) not_finite[count++] = key + i;
    }
    each();
  }
  return count;
}

}  // namespace
}  // namespace cpattn::kernels
