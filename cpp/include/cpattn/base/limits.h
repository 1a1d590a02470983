// SPDX-License-Identifier: Apache-2.0
#pragma once

// Limits of attention that plans and kernels share. This header has only constants, because kernels
// include no other header of the library.
#include <stdint.h>

namespace cpattn {

/// The largest head_dim.
constexpr int32_t kMaxHeadDim = 576;
/// A number of keys before or after a position that means "no bound".
constexpr int64_t kUnboundedKeys = int64_t{1} << 40;
/// Most keys that kernels pack at a time; for wide rows they divide it by a power of two.
constexpr int32_t kMaxBlockKeys = 1024;
/// Parts of a sequence whose keys may be read in place begin at multiples of this.
constexpr int32_t kInPlaceGranule = 512;
/// Floats that a row of a part keeps beside its outputs for the merge.
constexpr int32_t kPartialStateFloats = 4;

}  // namespace cpattn
