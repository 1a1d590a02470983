// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/dtype.h"

#include <ostream>

namespace cpattn {
namespace {

struct DTypeInfo {
  const char* name;
  int64_t bytes;
};

constexpr DTypeInfo kDTypes[] = {
    {"float32", 4}, {"float64", 8},       {"float16", 2},     {"bfloat16", 2},
    {"int8", 1},    {"uint8", 1},         {"int32", 4},       {"int64", 8},
    {"bool", 1},    {"float8_e4m3fn", 1}, {"float8_e5m2", 1},
};

}  // namespace

bool is_code(DType dtype) {
  return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2 || dtype == DType::int8;
}

int64_t element_size(DType dtype) { return kDTypes[static_cast<int>(dtype)].bytes; }

const char* dtype_name(DType dtype) { return kDTypes[static_cast<int>(dtype)].name; }

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << dtype_name(dtype); }

}  // namespace cpattn
