// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/tensor_argument.h"
#include "cpattn/index_table.h"

namespace cpattn::bindings {

/// An int or NumPy integer scalar. Anything else, float and bool included, is
/// TypeError. `name` reads "function: argument".
int64_t index_value(pybind11::handle object, const char* name);

/// A list or tuple of int, or a one-dimensional NumPy or torch CPU array of
/// int32 or int64, as int64. Anything else is TypeError.
std::vector<int64_t> index_list(pybind11::handle object, const char* name);
/// The same, or none for None.
std::optional<std::vector<int64_t>> optional_index_list(pybind11::handle object, const char* name);

/// A two-dimensional index array, or a list of lists. Rows of a list may differ
/// in length; the missing tail reads as -1. Valid while both it and the object live.
class IndexTableArgument {
 public:
  IndexTableArgument(pybind11::handle object, const char* name);
  const IndexTable& operator*() const { return table_; }

 private:
  IndexTable table_;
  std::optional<TensorArgument> tensor_;
  std::vector<int64_t> owned_;
};

}  // namespace cpattn::bindings
