// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/kv_format.h"

#include <string>

#include "cpattn/base/check.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::optional<DType> parse_kv_dtype(const Arguments& read, py::handle kv_dtype) {
  if (kv_dtype.is_none()) return std::nullopt;
  const std::string name = read.text(kv_dtype, "kv_dtype");
  for (DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2, DType::int8}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  check(
      false, read.name("kv_dtype"), " must be 'float8_e4m3fn', 'float8_e5m2' or 'int8', got '",
      name, "'"
  );
  return std::nullopt;
}

TensorView as_codes(
    const Arguments& read,
    const char* name,
    const TensorView& given,
    const std::optional<DType>& kv_dtype
) {
  TensorView cache = given;
  if (kv_dtype) {
    check(
        cache.dtype == DType::uint8 || cache.dtype == *kv_dtype, read.name(name), " must be ",
        *kv_dtype, ", as kv_dtype says, or its bytes in uint8, got ", cache.dtype
    );
    cache.dtype = *kv_dtype;
  }
  check(
      cache.dtype != DType::uint8, read.name(name),
      " of uint8 needs kv_dtype, which says what its ",
      "bytes are: 'float8_e4m3fn', 'float8_e5m2' or 'int8'"
  );
  return cache;
}

ScaleArgument::ScaleArgument(
    const Arguments& read,
    py::handle scale,
    const char* name,
    KVAxisOrder layout,
    int64_t page_size,
    int64_t num_kv_heads
) {
  if (scale.is_none()) return;
  if (is_number(scale)) {
    value.tensor = read.real(scale, name);
    return;
  }
  tensor_.emplace(read.tensor(scale, name));
  value = kv_scale(read.function(), name, **tensor_, layout, page_size, num_kv_heads);
}

}  // namespace cpattn::bindings
