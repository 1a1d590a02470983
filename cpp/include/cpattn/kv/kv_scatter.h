// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "cpattn/base/tensor_view.h"
#include "cpattn/kv/kv_pool.h"

namespace cpattn {

/// Rows of one kind on their way into a pool.
struct KVRows {
  const char* name;  // of the argument, for messages
  /// Any shape with row_elements of the buffer for each slot: row i is the i-th in row-major
  /// order. The last dimension is contiguous, other strides are free.
  TensorView rows;
  const KVBuffer& buffer;
  /// Rows of another dtype are divided by `scale` or, if given, by `scales`: float32 [num_heads],
  /// one for each of a row's heads, which follow each other.
  double scale = 1;
  std::optional<TensorView> scales;
  int64_t num_heads = 1;
  /// The buffer of scales of each token and head, float32, float16 or bfloat16, with
  /// row_elements = num_heads and slots as `buffer` has them. For converted rows the scales are
  /// computed, and neither `scale` nor `scales` may be given. Rows of the buffer's own dtype bring
  /// their scales: `scales`, of the dtype of scale_buffer, num_heads for each row in any shape.
  const KVBuffer* scale_buffer = nullptr;
};

/// Writes rows of all parts to slots of a layer: row i to slots[i]; -1 skips the row. If rows share
/// a slot the last one counts, for any number of threads; the call may set `slots` of the others to
/// -1.
///
/// Large writes bypass the CPU caches. Rows of the buffer's dtype are copied; a buffer of
/// float8_e4m3fn or float8_e5m2 takes rows of uint8, too. Float32, float16 and bfloat16 become
/// another dtype: x / scale in float32, then rounded to nearest even. Numbers that are too large
/// become infinities in float16, and in 8-bit codes the largest number:
///
///   float8_e4m3fn  448, infinities too; NaN is NaN
///   float8_e5m2    57344, but infinities stay infinities; NaN is NaN
///   int8           127 and -127, infinities too; NaN is -128, which nothing else becomes
///
/// The scale of a token and head is max(|x|) divided by that number and rounded to the dtype of
/// scale_buffer; the rounded scale is the divisor. It is at most the largest number of its dtype; a
/// scale below 2^-126 becomes 0, with codes of 0. With a NaN or an infinity the scale is NaN, and
/// the codes are 0x7f for float8 and 0 for int8: all of the head reads back as NaN.
///
/// Throws std::invalid_argument, which names `function`, for another layer, slots that are not
/// in the buffer, a wrong number of elements, other dtypes, a scale that is not a positive
/// number, missing or unexpected scales, and rows or scales that overlap any part of the layer.
/// Nothing is written then.
void write_kv_rows(
    const char* function, int64_t layer, std::span<int64_t> slots, std::span<const KVRows> parts
);

}  // namespace cpattn
