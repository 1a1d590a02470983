// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two matrix products of attention over the operands of any engine, and the engine of
// float32. Needs the vector layer included first.
//
// A panel is kPanel columns of the right-hand matrix, stored row by row: for
// Q K^T the columns are keys and the rows dimensions, for P V the columns are
// dimensions and the rows keys. Left-hand rows are read as they are. engine-inl.h has
// the contract of engines.
#include "kernels/engines/engine-inl.h"

namespace cpattn::kernels {
namespace {

constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kProductRows = 6;
/// Keys are masked, exponentiated and multiplied in groups of this many.
constexpr int kKeyGranule = 32;
/// Bytes of a panel that all rows are multiplied with before the next bytes; they stay in L1.
constexpr int kPieceBytes = 32 * 1024;

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Prefetches to L2, of the rows a granule after `key`, the cache line that begins with byte
/// `offset`, if one does. In a cache of many heads the rows of one head lie too far apart for
/// hardware prefetch, and whole rows at once would wait for miss buffers. Always inlined: GCC drops
/// calls of functions that only prefetch.
[[gnu::always_inline]] inline void fetch_ahead(
    const char* const* rows, int key, int n, int offset
) {
  if (offset % 64 != 0) return;
  for (int i = 0; i < n; ++i) __builtin_prefetch(rows[key + kKeyGranule + i] + offset, 0, 2);
}

/// p[0 .. 2 * kLanes) as float32. A layer may have its own function for a type.
template <class T>
void load_two(const T* p, Vector& first, Vector& second) {
  first = load(p);
  second = load(p + kLanes);
}

/// float32 operands for any storage type: 16-bit inputs are widened while they are packed, and
/// probabilities keep their full precision.
struct Float32Engine {
  using Operand = float;
  using Pack = Vector;
  static constexpr int kDepthStep = 1;
  static Pack load_columns(const float* p) { return load(p); }
  static Pack splat_row(const float* p) { return splat(*p); }
  static Vector multiply_add(Pack a, Pack b, Vector sum) { return fma(a, b, sum); }

  template <class T>
  static constexpr bool kTakesQueries = sizeof(T) == sizeof(float);

  template <class T>
  static void pack_query(const T* source, int dim, float* row) {
    int d = 0;
    for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
      Vector first;
      Vector second;
      load_two(source + d, first, second);
      store(row + d, first);
      store(row + d + kLanes, second);
    }
    if (d < dim) store(row + d, load(source + d));
  }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      float* panels
  ) {
    for (int key = begin; key < round_up(end, kKeyGranule); key += kLanes) {
      float* panel =
          panels + key / kPanel * panel_size + int64_t{first_row} * kPanel + key % kPanel;
      for (int d = 0; d < dim; d += kLanes) {
        fetch_ahead(rows, key, kLanes, d * static_cast<int>(sizeof(T)));
        Vector block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          block[i] =
              key + i < end ? load(reinterpret_cast<const T*>(rows[key + i]) + d) : splat(0.0F);
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(panel + int64_t{d + i} * kPanel, block[i]);
      }
    }
  }

  template <class T>
  static int pack_values(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int64_t panel_size,
      float* panels,
      int* not_finite
  ) {
    int count = 0;
    for (int key = begin; key < round_up(end, kKeyGranule); ++key) {
      Vector seen = splat(0.0F);  // becomes NaN with the first infinity or NaN
      for (int d = 0; d < dim; d += kLanes) {
        float* cell = panels + d / kPanel * panel_size + int64_t{key} * kPanel + d % kPanel;
        fetch_ahead(rows, key, 1, d * static_cast<int>(sizeof(T)));
        const Vector x = key < end ? load(reinterpret_cast<const T*>(rows[key]) + d) : splat(0.0F);
        seen = fma(x, splat(0.0F), seen);
        store(cell, x);
      }
      if (reduce_add(seen) != 0) not_finite[count++] = key;
    }
    return count;
  }

  static float probability(const float* p) { return *p; }
};

/// The common part of engines whose products take bfloat16 operands in pairs along the depth.
struct Bfloat16Pairs {
  using Operand = Bfloat16;
  static constexpr int kDepthStep = 2;
  template <class T>
  static constexpr bool kTakesQueries = true;

  template <class T>
  static void pack_query(const T* source, int dim, Bfloat16* row) {
    __builtin_memcpy(row, source, dim * sizeof(Bfloat16));
  }

  static float probability(const Bfloat16* p) {
    const uint32_t bits = uint32_t{p->bits} << 16;
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
  }
};

/// c (+)= a * panel for kRows rows and kVectors vectors of columns.
template <class Engine, int kRows, int kVectors, bool kAccumulate>
  requires(!HasTileProduct<Engine>)
void multiply(
    const typename Engine::Operand* a,
    int64_t lda,
    const typename Engine::Operand* panel,
    int depth,
    float* c,
    int64_t ldc
) {
  constexpr int kStep = Engine::kDepthStep;
  Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = kAccumulate ? load(c + i * ldc + j * kLanes) : splat(0.0F);
    }
  }
  for (int k = 0; k < depth; k += kStep, panel += kStep * kPanel) {
    typename Engine::Pack b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) b[j] = Engine::load_columns(panel + j * kStep * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const auto x = Engine::splat_row(a + i * lda + k);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Engine::multiply_add(x, b[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
  }
}

template <HasTileProduct Engine, int kRows, int kVectors, bool kAccumulate>
void multiply(
    const typename Engine::Operand* a,
    int64_t lda,
    const typename Engine::Operand* panel,
    int depth,
    float* c,
    int64_t ldc
) {
  Engine::template multiply<kRows, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
}

/// `rounds` of the engine's product on as many accumulators as its micro-kernel
/// has, all in registers; returns the number of flops.
template <class Engine>
int64_t peak_flops(int64_t rounds) {
  constexpr int kSums = kProductRows * kPanelVectors;
  constexpr int kFlops = 2 * Engine::kDepthStep * kLanes;
  typename Engine::Operand operands[Engine::kDepthStep * kLanes];
  __builtin_memset(operands, 0x3e, sizeof operands);  // 0.19 in either format
  const auto row = Engine::splat_row(operands);
  const auto columns = Engine::load_columns(operands);
  Vector sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = splat(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = Engine::multiply_add(row, columns, sums[i]);
  }
  float total = 0;
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) total += reduce_add(sums[i]);
  [[maybe_unused]] const volatile float sink = total;
  return rounds * kSums * kFlops;
}

template <class Engine, int kVectors, bool kAccumulate>
void multiply_rows(
    int rows,
    const typename Engine::Operand* a,
    int64_t lda,
    const typename Engine::Operand* panel,
    int depth,
    float* c,
    int64_t ldc
) {
  const auto take = [&]<int kRows> {
    multiply<Engine, kRows, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    a += kRows * lda;
    c += kRows * ldc;
    rows -= kRows;
  };
  // Tiles of one or two rows would wait for their sums: the last seven or eight rows divide better.
  while (rows >= kProductRows + 3 || rows == kProductRows) take.template operator()<kProductRows>();
  if (rows > kProductRows) take.template operator()<4>();
  switch (rows) {
    case 5:
      return multiply<Engine, 5, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    case 4:
      return multiply<Engine, 4, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    case 3:
      return multiply<Engine, 3, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    case 2:
      return multiply<Engine, 2, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    case 1:
      return multiply<Engine, 1, kVectors, kAccumulate>(a, lda, panel, depth, c, ldc);
    default:
      return;
  }
}

template <class Engine, bool kAccumulate>
void multiply_columns(
    int vectors,
    int rows,
    const typename Engine::Operand* a,
    int64_t lda,
    const typename Engine::Operand* panel,
    int depth,
    float* c,
    int64_t ldc
) {
  if constexpr (kPanelVectors == 4) {
    switch (vectors) {
      case 3:
        return multiply_rows<Engine, 3, kAccumulate>(rows, a, lda, panel, depth, c, ldc);
      case 2:
        return multiply_rows<Engine, 2, kAccumulate>(rows, a, lda, panel, depth, c, ldc);
      case 1:
        return multiply_rows<Engine, 1, kAccumulate>(rows, a, lda, panel, depth, c, ldc);
    }
  }
  multiply_rows<Engine, kPanelVectors, kAccumulate>(rows, a, lda, panel, depth, c, ldc);
}

/// c (+)= a * b for columns [begin, end) of b, both multiples of 16; `b` points
/// to the first panel, `depth_offset` skips rows of every panel. All rows pass a
/// piece of a panel while it is in L1.
template <class Engine, bool kAccumulate>
void multiply_panels(
    int rows,
    const typename Engine::Operand* a,
    int64_t lda,
    const typename Engine::Operand* b,
    int64_t panel_size,
    int depth_offset,
    int depth,
    int begin,
    int end,
    float* c,
    int64_t ldc
) {
  constexpr int kPiece =
      kPieceBytes / (kPanel * static_cast<int>(sizeof(typename Engine::Operand)));
  for (int column = begin / kPanel * kPanel; column < end; column += kPanel) {
    const auto* panel = b + column / kPanel * panel_size + int64_t{depth_offset} * kPanel;
    const int vectors = (end - column + kLanes - 1) / kLanes;
    float* block = c + column;
    multiply_columns<Engine, kAccumulate>(
        vectors, rows, a, lda, panel, depth < kPiece ? depth : kPiece, block, ldc
    );
    for (int k = kPiece; k < depth; k += kPiece) {
      const int piece = depth - k < kPiece ? depth - k : kPiece;
      multiply_columns<Engine, true>(
          vectors, rows, a + k, lda, panel + int64_t{k} * kPanel, piece, block, ldc
      );
    }
  }
}

}  // namespace
}  // namespace cpattn::kernels
