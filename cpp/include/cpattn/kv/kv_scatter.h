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
  /// Divisors of rows of another dtype: `scale`; or `scales`, float32 [num_heads], one for each of
  /// the heads, which a row holds one after the other.
  double scale = 1;
  std::optional<TensorView> scales;
  int64_t num_heads = 1;
  /// The buffer of scales of each token and head, float32, float16 or bfloat16, with
  /// row_elements = num_heads and slots as `buffer` has them. If rows are converted, their scales
  /// are computed, and neither of the two above may be given. Rows of the buffer's own dtype bring
  /// theirs: `scales`, of the dtype of scale_buffer, num_heads for each row in any shape.
  const KVBuffer* scale_buffer = nullptr;
};

/// Writes rows of all parts to slots of a layer: row i to slots[i]; -1 skips the row. Of rows for
/// one slot the last one counts, whatever the number of threads; `slots` of the others may be set
/// to -1.
///
/// Large writes go past the caches. Rows of the buffer's dtype are copied; a buffer of
/// float8_e4m3fn or float8_e5m2 takes rows of uint8, too. Float32, float16 and bfloat16 become
/// another dtype: x / scale in float32, then rounded to nearest even. In float16 what is too large
/// is an infinity, and codes of 8 bits end at their largest number:
///
///   float8_e4m3fn  448, infinities too; NaN is NaN
///   float8_e5m2    57344, but infinities stay infinities; NaN is NaN
///   int8           127 and -127, infinities too; NaN is -128, which nothing else becomes
///
/// The scale of a token and head is max(|x|) divided by that number, rounded to the dtype of
/// scale_buffer and divided by as it is stored there. It is at most the largest number of the
/// dtype; what is below 2^-126 is 0, and the codes then are 0. With a NaN or an infinity the scale
/// is NaN, and the codes are 0x7f for float8 and 0 for int8: all of the head reads back as NaN.
///
/// Throws std::invalid_argument, which names `function`, for another layer, slots that are not
/// in the buffer, a wrong number of elements, other dtypes, a scale that is not a positive
/// number, scales that are missing or not wanted, and rows or scales that lie where any part of the
/// layer is written. Nothing is written then.
void write_kv_rows(
    const char* function, int64_t layer, std::span<int64_t> slots, std::span<const KVRows> parts
);

}  // namespace cpattn
