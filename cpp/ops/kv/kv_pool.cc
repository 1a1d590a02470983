// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/kv_pool.h"

#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// Checks all sizes and returns their product.
int64_t buffer_bytes(
    const char* function, int64_t layers, int64_t slots, int64_t elements, int64_t element_bytes
) {
  check(
      layers >= 1 && slots >= 1 && elements >= 1, function,
      ": sizes of a buffer must be >= 1, got ", layers, " layers of ", slots, " rows of ", elements,
      " elements"
  );
  int64_t bytes = element_bytes;
  bool overflow = false;
  for (int64_t size : {layers, slots, elements}) {
    overflow |= __builtin_mul_overflow(bytes, size, &bytes);
  }
  check(
      !overflow, function, ": a buffer must be below 2^63 bytes, got ", layers, " layers of ",
      slots, " rows of ", elements, " elements"
  );
  return bytes;
}

}  // namespace

KVBuffer::KVBuffer(
    const char* function,
    int64_t num_layers,
    int64_t num_slots,
    int64_t row_elements,
    DType dtype,
    std::span<const int> nodes
)
    : KVBuffer(
          function,
          num_layers,
          num_slots,
          row_elements,
          dtype,
          PoolMemory::make(
              function,
              buffer_bytes(function, num_layers, num_slots, row_elements, element_size(dtype)),
              nodes
          )
      ) {}

KVBuffer::KVBuffer(
    const char* function,
    int64_t num_layers,
    int64_t num_slots,
    int64_t row_elements,
    DType dtype,
    std::shared_ptr<PoolMemory> memory
)
    : num_layers_(num_layers),
      num_slots_(num_slots),
      row_elements_(row_elements),
      dtype_(dtype),
      memory_(std::move(memory)) {
  const int64_t needed =
      buffer_bytes(function, num_layers, num_slots, row_elements, element_size(dtype));
  check(
      memory_->num_bytes() >= needed, function, ": the memory of a buffer must have ", needed,
      " bytes, got ", memory_->num_bytes()
  );
}

}  // namespace cpattn
