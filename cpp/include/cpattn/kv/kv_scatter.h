// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/base/tensor_view.h"
#include "cpattn/kv/kv_pool.h"

namespace cpattn {

/// Rows of one kind on their way into a pool.
struct KVRows {
  const char* name;  // of the argument, for messages
  /// As many elements as there are slots times row_elements of the buffer, in any shape:
  /// row i is the i-th in row-major order. The last dimension is contiguous, other strides are
  /// free.
  TensorView rows;
  const KVBuffer& buffer;
  double scale = 1;  // what rows of another dtype are divided by
};

/// Writes rows of all parts to slots of a layer: row i to slots[i]; -1 skips the row. Of rows for
/// one slot the last one counts, whatever the number of threads; `slots` of the others may be set
/// to -1.
///
/// Large writes go past the caches. Rows of the buffer's dtype are copied; a buffer of
/// float8_e4m3fn takes rows of uint8, too. Float32, float16 and bfloat16 become another dtype:
/// x / scale in float32, then rounded to nearest even. In float8_e4m3fn what is beyond 448 counts
/// as 448, infinities too, and NaN is NaN, as torch has it; in float16 what is too large is an
/// infinity.
///
/// Throws std::invalid_argument, which names `function`, for another layer, slots that are not
/// in the buffer, a wrong number of elements, other dtypes, a scale that is not a positive number
/// and rows that lie where any part of the layer is written. Nothing is written then.
void write_kv_rows(
    const char* function, int64_t layer, std::span<int64_t> slots, std::span<const KVRows> parts
);

}  // namespace cpattn
