// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products in bfloat16 with BFDOT: two rows of a panel are interleaved,
// so that one 32-bit lane holds a column's pair.
//
// BFDOT adds a pair's products to each other, then to the lane, rounds both sums
// to odd and counts subnormals as zeros. A chain of n products thus makes half
// as many roundings as in float32, each at most twice as large: its error has
// the same bound, n + 2 times 2^-24 of the sum of the magnitudes.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

inline void store_probabilities(Bfloat16* p, Vector a, Vector b) {
  const bfloat16x8_t both = vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b);
  vst1q_u16(&p->bits, vreinterpretq_u16_bf16(both));
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
    constexpr int kStep = 2 * kLanes;
    const uint16x8_t exponent_and_below = vdupq_n_u16(0x7fff);
    int count = 0;
    for (int key = begin; key < round_up(end, kKeyGranule); key += 2) {
      uint16x8_t largest_even = vdupq_n_u16(0);
      uint16x8_t largest_odd = vdupq_n_u16(0);
      for (int d = 0; d < dim; d += kStep) {
        fetch_ahead(rows, key, 2, d * 2);
        const uint16x8_t even = load_or_zeros(rows, key, end, d);
        const uint16x8_t odd = load_or_zeros(rows, key + 1, end, d);
        uint16_t* cell =
            &panels[d / kPanel * panel_size + int64_t{key} * kPanel + d % kPanel * 2].bits;
        vst1q_u16(cell, vzip1q_u16(even, odd));
        vst1q_u16(cell + kStep, vzip2q_u16(even, odd));
        largest_even = vmaxq_u16(largest_even, vandq_u16(even, exponent_and_below));
        largest_odd = vmaxq_u16(largest_odd, vandq_u16(odd, exponent_and_below));
      }
      if (vmaxvq_u16(largest_even) >= 0x7f80) not_finite[count++] = key;
      if (vmaxvq_u16(largest_odd) >= 0x7f80) not_finite[count++] = key + 1;
    }
    return count;
  }

 private:
  /// Eight elements of a row from dimension d on; zeros for rows from n on.
  static uint16x8_t load_or_zeros(const char* const* rows, int row, int n, int d) {
    if (row >= n) return vdupq_n_u16(0);
    return vld1q_u16(reinterpret_cast<const uint16_t*>(rows[row]) + d);
  }
};

}  // namespace
}  // namespace cpattn::kernels
