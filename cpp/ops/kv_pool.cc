// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv_pool.h"

#include <sys/mman.h>

#include <new>
#include <string>
#include <utility>

#include "cpattn/check.h"

namespace cpattn {
namespace {

class OutOfAddressSpace final : public std::bad_alloc {
 public:
  explicit OutOfAddressSpace(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// The product of the sizes, all of them checked.
int64_t checked_bytes(
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
    const char* function, int64_t num_layers, int64_t num_slots, int64_t row_elements, DType dtype
)
    : num_layers_(num_layers), num_slots_(num_slots), row_elements_(row_elements), dtype_(dtype) {
  const int64_t bytes =
      checked_bytes(function, num_layers, num_slots, row_elements, element_size(dtype));
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const data = mmap(nullptr, bytes, kProtection, kFlags, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfAddressSpace(concat(function, ": the system has no ", bytes, " bytes for a buffer"));
  }
  data_ = static_cast<char*>(data);
  madvise(data, bytes, MADV_HUGEPAGE);  // where the system has none, small pages do
}

KVBuffer::~KVBuffer() { munmap(data_, num_bytes()); }

}  // namespace cpattn
