// SPDX-License-Identifier: Apache-2.0
#pragma once

// Queries, keys and values as tiles. Like every file that includes it, this needs
// vector/avx512-inl.h and tiles-inl.h or twin-inl.h included first.
//
// A left-hand tile is 16 rows of 32 elements. A right-hand tile has 16 columns
// and 32 rows of the matrix, two of them interleaved to a row of 16 pairs. Where
// an element has two parts (format-inl.h), so has a run of tiles: all first
// parts, then all rests.
#include "kernels/amx/format-inl.h"
#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/gemm_bf16-inl.h"

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
constexpr int kAmxBlockKeys = 256 / TileFormat<T>::kParts;
template <class T>
constexpr int kAmxChunks = kAmxBlockKeys<T> / kTileDepth;
/// Keys packed at a time, at most.
constexpr int kMaxPackedKeys = 1024;

/// The tile unit falls asleep when it has no product for 300 ns and is slow to
/// wake. Vector work of its own calls this every few hundred cycles; operand
/// tiles are free for it, as every product loads its own.
inline void keep_tiles_awake() { multiply_tiles<5, 4, 6>(); }

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
    Bfloat16* columns = tiles + int64_t{key} * depth * kParts + first / 2 * kTileDepth;
    const char* rows16[16];
    for (int i = 0; i < 16; ++i) rows16[i] = key + i < n ? rows[key + i] : kZeroRow;
    for (int d = 0; d < dim; d += 32) {
      if (d * kParts % 128 == 0) keep_tiles_awake();
      const bool half = dim - d < 32;
      Bfloat16* cell = columns + d / 2 * kTileDepth;
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
}

/// Packs values rows[0..n) as rows into [block][dim / 16][chunk][part][16 pairs of keys][16
/// dimensions][2], the keys of a chunk in the order of its probabilities; keys up to the next
/// multiple of 32 are zeros. Lists the keys that hold an infinity or NaN; returns their number.
template <class T>
inline int pack_tile_values(
    const char* const* rows, int n, int dim, Bfloat16* tiles, int* not_finite
) {
  constexpr int kParts = TileFormat<T>::kParts;
  constexpr int64_t kColumnTiles = int64_t{kAmxChunks<T>} * kParts * kTileElements;
  // unpack works within quarters: this order of 64-bit words makes it take the
  // first sixteen dimensions, then the last.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  int count = 0;
  for (int key = 0; key < n || key % kTileDepth != 0; key += 2) {
    const int chunk = key / kTileDepth;
    Bfloat16* pair = tiles + chunk / kAmxChunks<T> * kColumnTiles * (dim / 16) +
                     chunk % kAmxChunks<T> * kParts * kTileElements +
                     TileFormat<T>::word_of(key % kTileDepth) * 16;
    Magnitude magnitudes[2];
    if (key % 4 == 0) keep_tiles_awake();
    for (int d = 0; d < dim; d += 32) {
      const __mmask8 present = dim - d < 32 ? 0x0f : 0xff;
      __m512i x[2][kParts];
      for (int i = 0; i < 2; ++i) {
        const __m512i row = key + i < n ? _mm512_maskz_loadu_epi64(present, rows[key + i] + d * 2)
                                        : _mm512_setzero_si512();
        magnitudes[i].add(row);
        TileFormat<T>::split(_mm512_permutexvar_epi64(order, row), x[i]);
      }
      Bfloat16* cell = pair + d / 16 * kColumnTiles;
      for (int part = 0; part < kParts; ++part, cell += kTileElements) {
        _mm512_store_si512(cell, _mm512_unpacklo_epi16(x[0][part], x[1][part]));
        if (present == 0xff) {
          _mm512_store_si512(cell + kColumnTiles, _mm512_unpackhi_epi16(x[0][part], x[1][part]));
        }
      }
    }
    for (int i = 0; i < 2; ++i) {
      if (!magnitudes[i].below(TileFormat<T>::kInfinity)) not_finite[count++] = key + i;
    }
  }
  return count;
}

}  // namespace
}  // namespace cpattn::kernels
