// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of int8 with SDOT: four rows of a panel are interleaved, so that one 32-bit lane holds
// four dimensions of a key. Needs the vector layer included first.
#include "kernels/engines/gemm-inl.h"

namespace cpattn::kernels {
namespace {

struct Int8DotEngine {
  using Operand = int8_t;
  using Pack = int8x16_t;
  using Sum = int32x4_t;
  static constexpr int kDepthStep = 4;
  static constexpr int kStartRows = 0;

  static Pack load_columns(const int8_t* p) { return vld1q_s8(p); }
  static Pack splat_row(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  static Sum multiply_add(Pack query, Pack keys, Sum sum) { return vdotq_s32(sum, query, keys); }
  static Sum start(const int8_t* /*panel*/) { return vdupq_n_s32(0); }
  static Vector value(Sum sum) { return vcvtq_f32_s32(sum); }

  template <class T>
  static void pack_query(const int8_t* source, int dim, int8_t* row) {
    __builtin_memcpy(row, source, dim);
  }

  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      int8_t* panels
  ) {
    constexpr int kStep = kDepthStep * kLanes;  // dimensions of one vector
    for (int key = begin; key < round_up(end, kKeyGranule); key += kLanes) {
      int8_t* panel = panels + key / kPanel * panel_size + int64_t{first_row} * kPanel +
                      key % kPanel * kDepthStep;
      for (int d = 0; d < dim; d += kStep) {
        fetch_ahead(rows, key, kLanes, d);
        Vector block[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          block[i] = splat(0.0F);
          if (key + i >= end) continue;
          block[i] =
              vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(rows[key + i]) + d));
        }
        transpose(block);
        for (int i = 0; i < kLanes; ++i) {
          vst1q_s8(panel + int64_t{d + kDepthStep * i} * kPanel, vreinterpretq_s8_f32(block[i]));
        }
      }
    }
  }
};

}  // namespace
}  // namespace cpattn::kernels
