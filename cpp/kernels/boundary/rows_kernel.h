// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary between ops and the kernels of rows that are quantised, normalised or transformed.
#include <stdint.h>

#include "kernels/boundary/attention_kernel.h"

namespace cpattn::kernels {

/// A row of the FP8 cache of multi-head latent attention: 512 e4m3fn codes, 4 float32
/// scales, one per 128 codes, and 64 bfloat16 numbers that are not quantised.
constexpr int64_t kKvCodes = 512;
constexpr int64_t kKvGroup = 128;
constexpr int64_t kKvRope = 64;
constexpr int64_t kKvDim = kKvCodes + kKvRope;
constexpr int64_t kKvCodeBytes = kKvCodes + kKvCodes / kKvGroup * 4;
constexpr int64_t kKvRowBytes = kKvCodeBytes + kKvRope * 2;

/// Formats of groups of 128 numbers of the indexer. The scale is the largest magnitude, at least
/// 1e-4, over 448 or over 127, and x / scale is rounded to nearest even.
enum GroupFormat : int32_t {
  kGroupFloat8,
  kGroupFloat8PowerOfTwo,  // with the scale rounded up to a power of two
  kGroupInt8,
};
constexpr int64_t kGroup = 128;

/// The fewest numbers that hadamard() takes.
constexpr int64_t kHadamardLeast = 16;

/// A group that holds a number that is not finite gets a scale of NaN, and codes that are NaN
/// (0 in int8).
struct RowKernels {
  /// Writes a row of the FP8 cache: 512 numbers become codes, each times 1 / scale, rounded to
  /// nearest even, where scale is the largest of its group over 448; 64 numbers become bfloat16.
  /// A group whose scale would be below the normal floats, such as one of zeros, has scale 0 and
  /// codes 0. `codes` gets kKvCodeBytes, `rope_out` the rest of the row.
  void (*quantize_kv_row[kNumElementTypes])(
      const void* nope, const void* rope, void* codes, void* rope_out
  );
  /// n numbers, a multiple of kGroup, and n / kGroup scales.
  void (*quantize_groups[kNumElementTypes])(
      const void* x, int64_t n, GroupFormat format, void* codes, float* scales
  );
  /// A row of n numbers, n a power of two, times the Hadamard matrix of n (in the order of
  /// Sylvester) and `scale`; if n is below kHadamardLeast, kHadamardLeast / n rows: count = max(n,
  /// kHadamardLeast). `scratch` holds count floats.
  void (*hadamard[kNumElementTypes])(
      const void* x, int64_t count, int64_t n, float scale, void* out, float* scratch
  );
  /// out = x / sqrt(mean(x * x) + eps) * weight + bias, n numbers; bias may be null.
  void (*rms_norm[kNumElementTypes])(
      const void* x, const float* weight, const float* bias, int64_t n, float eps, void* out
  );
  /// out = (codes + offset) * scale, n numbers, in float32 with one rounding at the end; offset may
  /// be null.
  void (*dequantize_int8[kNumElementTypes])(
      const int8_t* codes, const float* scale, const float* offset, int64_t n, void* out
  );
  /// n numbers as float32.
  void (*widen[kNumElementTypes])(const void* x, int64_t n, float* out);
  /// Reads a row of the FP8 cache as 576 bfloat16 or float32 numbers: code * scale in float32,
  /// rounded to nearest even. Rows need no alignment.
  void (*expand_kv_row)(const void* row, void* bfloat16s);
  void (*expand_kv_row_float32)(const void* row, float* out);
  /// n e4m3fn codes as bfloat16, exact. n is a multiple of 32.
  void (*expand_codes)(const void* codes, int64_t n, void* bfloat16s);
};

}  // namespace cpattn::kernels
