// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/arguments/argument_error.h"
#include "bindings/arguments/int_argument.h"
#include "bindings/arguments/tensor_argument.h"
#include "cpattn/base/index_table.h"

namespace cpattn::bindings {

/// A list or tuple of int, or a one-dimensional NumPy or torch CPU array of
/// int32 or int64, as int64. Anything else is TypeError.
std::vector<int64_t> index_list(pybind11::handle object, const ArgumentName& name);
/// Reads such a list, or none for None.
std::optional<std::vector<int64_t>> optional_index_list(
    pybind11::handle object, const ArgumentName& name
);
/// The number of values that index_list would read, without reading them.
int64_t index_count(pybind11::handle object, const ArgumentName& name);

/// A list or tuple of bools, or a one-dimensional tensor of bools, each as 0 or 1; a single bool is
/// a list of one. Anything else is TypeError.
std::vector<uint8_t> flag_list(pybind11::handle object, const ArgumentName& name);

/// A list or tuple of floats, or a one-dimensional tensor of float32 or float64. Anything else is
/// TypeError.
std::vector<double> real_list(pybind11::handle object, const ArgumentName& name);

/// A two-dimensional index array, or a list of lists. Rows of a list may differ
/// in length; the missing tail reads as -1. Valid while both it and the object live.
class IndexTableArgument {
 public:
  IndexTableArgument(pybind11::handle object, const ArgumentName& name);
  const IndexTable& operator*() const { return table_; }

 private:
  IndexTable table_;
  std::optional<TensorArgument> tensor_;
  std::vector<int64_t> owned_;
};

}  // namespace cpattn::bindings
