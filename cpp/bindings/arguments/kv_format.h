// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "bindings/arguments/arguments.h"
#include "cpattn/attention/attention_call.h"

namespace cpattn::bindings {

/// The kind of codes that kv_dtype names; null for None.
std::optional<DType> kv_dtype_value(const Arguments& read, pybind11::handle kv_dtype);

/// A scale of a cache: None, a number or a tensor of numbers, which it keeps alive.
class ScaleArgument {
 public:
  ScaleArgument(const Arguments& read, pybind11::handle scale, const char* name);

  GivenScale value;

 private:
  std::optional<TensorArgument> tensor_;
};

}  // namespace cpattn::bindings
