// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Rows of the FP8 cache of multi-head latent attention, 656 bytes each:
///   [0, 512)    e4m3fn codes of nope; element i is code * scales[i / 128]
///   [512, 528)  4 little-endian float32 scales
///   [528, 656)  64 bfloat16 numbers of rope, not quantised
///
/// All functions throw std::invalid_argument, before anything is written, for shapes, dtypes and
/// indices that do not fit and for results that overlap an input.

/// Writes T rows in two parts, which may lie together in rows of 656 bytes or apart:
///   nope   [T, 512] or [T, 1, 512], rope [T, 64] or [T, 1, 64], of one dtype (float32,
///          float16 or bfloat16)
///   codes  uint8 [T, 1, 528], rope_out uint8 [T, 1, 128]
///
/// A group of 128 elements has scale = max(|x|) / 448, and its codes are x * (1 / scale) in
/// float32, rounded to nearest even. A group whose scale would be below 2^-126, such as one of
/// zeros, has scale 0 and codes of zero bytes. A group with an infinity or NaN has scale NaN and
/// codes 0x7f: it reads back as NaN.
void quantize_kv_rows(
    const char* function,
    const TensorView& nope,
    const TensorView& rope,
    const TensorView& codes,
    const TensorView& rope_out
);

/// Reads rows back as bfloat16: code * scale in float32, rounded to nearest even.
///   rows     uint8 or float8_e4m3fn [..., 656] with 1 to 4 dimensions before; row i is the
///            i-th of all in row-major order, so i = block * block_size + offset
///   indices  the n rows to read, repeats allowed; none: all
///   out      bfloat16 [n, 1, 576]
void dequantize_kv_rows(
    const TensorView& rows, std::optional<std::span<const int64_t>> indices, const TensorView& out
);

}  // namespace cpattn
