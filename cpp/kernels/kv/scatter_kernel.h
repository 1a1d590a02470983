// SPDX-License-Identifier: Apache-2.0
#pragma once

// The boundary between ops and the kernels of rows on their way into a cache.
#include <stdint.h>

#include "kernels/attention/attention_kernel.h"

namespace cpattn::kernels {

/// The types that numbers are cast to: those of ElementType, with the same values, and e4m3fn.
enum CastType : int32_t { kCastFloat8 = kNumElementTypes, kNumCastTypes };

constexpr int64_t kStreamBytes = 64;

struct ScatterKernels {
  /// Casts n numbers: x / scale in float32, rounded to nearest even. As e4m3fn what is beyond 448
  /// becomes 448, infinities too, and NaN stays NaN.
  void (*cast[kNumElementTypes][kNumCastTypes])(const void* x, int64_t n, float scale, void* out);
  /// Copies past the caches, to memory that is not read soon. `to` and `bytes` are multiples of
  /// kStreamBytes. Other threads see the copy after this thread has called finish_stream().
  void (*stream)(const void* from, int64_t bytes, void* to);
  void (*finish_stream)();
};

}  // namespace cpattn::kernels
