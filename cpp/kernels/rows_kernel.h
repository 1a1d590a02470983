// SPDX-License-Identifier: Apache-2.0
#pragma once

// Quantised rows: the boundary between ops and kernels, as attention_kernel.h.
#include <stdint.h>

namespace cpattn::kernels {

/// A row of the FP8 cache of multi-head latent attention: 512 e4m3fn codes, 4 float32
/// scales, one per 128 codes, and 64 bfloat16 numbers that are not quantised.
constexpr int64_t kKvCodes = 512;
constexpr int64_t kKvGroup = 128;
constexpr int64_t kKvRope = 64;
constexpr int64_t kKvDim = kKvCodes + kKvRope;
constexpr int64_t kKvCodeBytes = kKvCodes + kKvCodes / kKvGroup * 4;
constexpr int64_t kKvRowBytes = kKvCodeBytes + kKvRope * 2;

struct RowKernels {
  /// One such row as 576 bfloat16 or float32 numbers: code * scale in float32, rounded
  /// to nearest even. Rows need no alignment.
  void (*expand_kv_row)(const void* row, void* bfloat16s);
  void (*expand_kv_row_float32)(const void* row, float* out);
  /// n e4m3fn codes as bfloat16, exact. n is a multiple of 32.
  void (*expand_codes)(const void* codes, int64_t n, void* bfloat16s);
};

}  // namespace cpattn::kernels
