// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary between ops and the kernels that write rows into a cache.
#include <stdint.h>

#include "kernels/boundary/attention_kernel.h"

namespace cpattn::kernels {

/// The types that numbers are cast to: those of ElementType, with the same values, and codes.
enum CastType : int32_t {
  kCastFloat8 = kNumElementTypes,
  kCastFloat8E5M2,
  kCastInt8,
  kNumCastTypes
};

constexpr int64_t kStreamBytes = 64;

struct ScatterKernels {
  /// Casts n numbers: x / scale in float32, rounded to nearest even. Magnitudes above the largest
  /// number of a code (448 of e4m3fn, 57344 of e5m2, 127 of int8) become that number, infinities
  /// too, except in e5m2, which keeps them. NaN stays NaN, and becomes -128 in int8, which has no
  /// NaN.
  void (*cast[kNumElementTypes][kNumCastTypes])(const void* x, int64_t n, float scale, void* out);
  /// The largest |x| of n > 0 numbers; NaN if any is NaN or infinite.
  float (*largest[kNumElementTypes])(const void* x, int64_t n);
  /// Copies bypassing the CPU caches, to memory that is not read soon. `to` and `bytes` are
  /// multiples of kStreamBytes. Other threads see the copy after this thread has called
  /// finish_stream().
  void (*stream)(const void* from, int64_t bytes, void* to);
  void (*finish_stream)();
};

}  // namespace cpattn::kernels
