// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows on their way into a cache: the boundary between ops and kernels, as attention_kernel.h.
#include <stdint.h>

#include "kernels/attention/attention_kernel.h"

namespace cpattn::kernels {

/// What numbers become: the types of ElementType, with the same values, and e4m3fn.
enum CastType : int32_t { kCastFloat8 = kNumElementTypes, kNumCastTypes };

constexpr int64_t kStreamBytes = 64;

struct ScatterKernels {
  /// n numbers: x / scale in float32, rounded to nearest even. As e4m3fn what is beyond 448
  /// counts as 448, infinities too, and NaN is NaN.
  void (*cast[kNumElementTypes][kNumCastTypes])(const void* x, int64_t n, float scale, void* out);
  /// Copies past the caches, to what is not read soon. `to` and `bytes` are multiples of
  /// kStreamBytes. Other threads see it after finish_stream() of this one.
  void (*stream)(const void* from, int64_t bytes, void* to);
  void (*finish_stream)();
};

}  // namespace cpattn::kernels
