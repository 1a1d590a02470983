// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/kv_format.h"

namespace py = pybind11;

namespace cpattn::bindings {

std::optional<DType> kv_dtype_value(const Arguments& read, py::handle kv_dtype) {
  if (kv_dtype.is_none()) return std::nullopt;
  return parse_kv_dtype(read.function(), read.text(kv_dtype, "kv_dtype"));
}

ScaleArgument::ScaleArgument(const Arguments& read, py::handle scale, const char* name) {
  if (scale.is_none()) return;
  if (is_number(scale)) {
    value.number = read.real(scale, name);
  } else {
    value.tensor = *tensor_.emplace(read.tensor(scale, name));
  }
}

}  // namespace cpattn::bindings
