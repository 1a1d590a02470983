// SPDX-License-Identifier: Apache-2.0
#pragma once

// Limits of attention that plans and kernels share: constants alone, because kernels include no
// other header of the library.
#include <stdint.h>

namespace cpattn {

/// Dimensions of a head, at most.
constexpr int32_t kMaxHeadDim = 576;
/// Stands for no bound where keys before or after a position are counted.
constexpr int64_t kUnboundedKeys = int64_t{1} << 40;
/// Keys that kernels pack at a time, at most; fewer, by a power of two, where rows are wide.
constexpr int32_t kMaxBlockKeys = 1024;
/// Parts of a sequence whose keys may be read in place begin at multiples of this.
constexpr int32_t kInPlaceGranule = 512;
/// Floats that a row of a part keeps beside its outputs, because merging needs them.
constexpr int32_t kPartialStateFloats = 4;

}  // namespace cpattn
