// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products in bfloat16. Attention uses BFMMLA, which multiplies two rows by two columns with
// four operands of each; scores of the indexer use BFDOT: one row, four columns, two operands.
//
// BFDOT adds a pair's products to each other, then to the lane, rounds both sums
// to odd and counts subnormals as zeros; BFMMLA does so twice for each sum. A chain of n products
// thus has half as many roundings as in float32, each at most twice as large, and the same error
// bound: (n + 2) * 2^-24 of the sum of the magnitudes.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

inline void store_probabilities(Bfloat16* p, Vector a, Vector b) {
  const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b);
  vst1q_u16(&p->bits, vreinterpretq_u16_bf16(both));
}

/// Eight elements of a row from dimension d on; zeros for rows from n on.
inline uint16x8_t load_or_zeros(const char* const* rows, int row, int n, int d) {
  if (row >= n) return vdupq_n_u16(0);
  return vld1q_u16(reinterpret_cast<const uint16_t*>(rows[row]) + d);
}

struct Bfloat16Engine : Bfloat16Pairs {
  using Pack = bfloat16x8_t;
  static Pack load_columns(const Bfloat16* p) {
    return vreinterpretq_bf16_u16(vld1q_u16(&p->bits));
  }
  static Pack splat_row(const Bfloat16* p) {
    uint32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  static Vector multiply_add(Pack a, Pack b, Vector sum) { return vbfdotq_f32(sum, a, b); }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      Bfloat16* panels
  ) {
    constexpr int kStep = 2 * kLanes;  // dimensions of one vector, a lane per pair
    for (int key = begin; key < round_up(end, kKeyGranule); key += kLanes) {
      Bfloat16* panel =
          panels + key / kPanel * panel_size + int64_t{first_row} * kPanel + key % kPanel * 2;
      for (int d = 0; d < dim; d += kStep) {
        fetch_ahead(rows, key, kLanes, d * 2);
        Vector block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          block[i] = vreinterpretq_f32_u16(load_or_zeros(rows, key + i, end, d));
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) {
          vst1q_u16(&panel[int64_t{d + 2 * i} * kPanel].bits, vreinterpretq_u16_f32(block[i]));
        }
      }
    }
  }
};

/// Two rows of the left-hand matrix, or two columns of a panel, with four operands of each.
struct Bfloat16PairEngine : Bfloat16Pairs {
  using Pack = bfloat16x8_t;
  static constexpr int kDepthStep = 4;
  static Pack load_columns(const Bfloat16* p) { return load_two_rows(p, p + kDepthStep); }
  static Pack splat_row(const Bfloat16* p) { return load_two_rows(p, p); }
  static Vector multiply_add(Pack a, Pack b, Vector sum) { return vbfmmlaq_f32(sum, a, b); }

  template <int kRows, int kVectors, bool kAccumulate>
  static void multiply(
      const Bfloat16* a, int64_t lda, const Bfloat16* panel, int depth, float* c, int64_t ldc
  ) {
    constexpr int kRowPairs = (kRows + 1) / 2;
    constexpr int kColumnPairs = 2 * kVectors;
    Vector sums[kRowPairs][kColumnPairs];  // of rows i and i + 1: {c[i][j .. j + 2), c[i + 1][..]}
#pragma GCC unroll 3
    for (int i = 0; i < kRowPairs; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kColumnPairs; ++j) {
        sums[i][j] = splat(0.0F);
        if constexpr (kAccumulate) {
          const float* first = c + 2 * i * ldc + 2 * j;
          const float* second = 2 * i + 1 < kRows ? first + ldc : first;
          sums[i][j] = vcombine_f32(vld1_f32(first), vld1_f32(second));
        }
      }
    }
    for (int k = 0; k < depth; k += kDepthStep, panel += kDepthStep * kPanel) {
      Pack rows[kRowPairs];
#pragma GCC unroll 3
      for (int i = 0; i < kRowPairs; ++i) {
        const Bfloat16* first = a + 2 * i * lda + k;
        rows[i] = load_two_rows(first, 2 * i + 1 < kRows ? first + lda : first);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kColumnPairs; ++j) {
        const Pack columns = vreinterpretq_bf16_u16(vld1q_u16(&panel[j * 2 * kDepthStep].bits));
#pragma GCC unroll 3
        for (int i = 0; i < kRowPairs; ++i) {
          sums[i][j] = multiply_add(rows[i], columns, sums[i][j]);
        }
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < kRowPairs; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        float* first = c + 2 * i * ldc + j * kLanes;
        const auto left = vreinterpretq_f64_f32(sums[i][2 * j]);
        const auto right = vreinterpretq_f64_f32(sums[i][2 * j + 1]);
        store(first, vreinterpretq_f32_f64(vzip1q_f64(left, right)));
        if (2 * i + 1 < kRows) store(first + ldc, vreinterpretq_f32_f64(vzip2q_f64(left, right)));
      }
    }
  }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      Bfloat16* panels
  ) {
    for (int key = begin; key < round_up(end, kKeyGranule); key += 2) {
      Bfloat16* panel = panels + key / kPanel * panel_size + int64_t{first_row} * kPanel +
                        key % kPanel * kDepthStep;
      for (int d = 0; d < dim; d += 2 * kDepthStep) {
        fetch_ahead(rows, key, 2, d * 2);
        const auto even = vreinterpretq_u64_u16(load_or_zeros(rows, key, end, d));
        const auto odd = vreinterpretq_u64_u16(load_or_zeros(rows, key + 1, end, d));
        uint16_t* cell = &panel[int64_t{d} * kPanel].bits;
        vst1q_u16(cell, vreinterpretq_u16_u64(vzip1q_u64(even, odd)));
        vst1q_u16(cell + kDepthStep * kPanel, vreinterpretq_u16_u64(vzip2q_u64(even, odd)));
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
      Bfloat16* panels,
      int* not_finite
  ) {
    constexpr int kStep = 8;  // dimensions of one vector
    const uint16x8_t exponent_and_below = vdupq_n_u16(0x7fff);
    int count = 0;
    for (int key = begin; key < round_up(end, kKeyGranule); key += kDepthStep) {
      uint16x8_t largest[kDepthStep] = {};
      for (int d = 0; d < dim; d += kStep) {
        fetch_ahead(rows, key, kDepthStep, d * 2);
        uint16x8_t x[kDepthStep];
        for (int i = 0; i < kDepthStep; ++i) {
          x[i] = load_or_zeros(rows, key + i, end, d);
          largest[i] = vmaxq_u16(largest[i], vandq_u16(x[i], exponent_and_below));
        }
        uint16_t* cell =
            &panels[d / kPanel * panel_size + int64_t{key} * kPanel + d % kPanel * kDepthStep].bits;
        store_columns(cell, vzip1q_u16(x[0], x[1]), vzip1q_u16(x[2], x[3]));
        store_columns(cell + 4 * kDepthStep, vzip2q_u16(x[0], x[1]), vzip2q_u16(x[2], x[3]));
      }
      for (int i = 0; i < kDepthStep; ++i) {
        if (vmaxvq_u16(largest[i]) >= 0x7f80) not_finite[count++] = key + i;
      }
    }
    return count;
  }

 private:
  static Pack load_two_rows(const Bfloat16* first, const Bfloat16* second) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(&first->bits), vld1_u16(&second->bits)));
  }
  /// Stores four columns: a pair of `upper` and a pair of `lower` for each.
  static void store_columns(uint16_t* cell, uint16x8_t upper, uint16x8_t lower) {
    const auto a = vreinterpretq_u32_u16(upper);
    const auto b = vreinterpretq_u32_u16(lower);
    vst1q_u16(cell, vreinterpretq_u16_u32(vzip1q_u32(a, b)));
    vst1q_u16(cell + 2 * kDepthStep, vreinterpretq_u16_u32(vzip2q_u32(a, b)));
  }
};

}  // namespace
}  // namespace cpattn::kernels
