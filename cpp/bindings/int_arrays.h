// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <span>
#include <vector>

namespace cpattn::bindings {

/// A new list of int.
pybind11::list int_list(std::span<const int32_t> values);

/// A read-only NumPy view of `values`, which `owner` keeps alive. NumPy refuses
/// to make it writable, because the owner offers no buffer.
pybind11::array int_view(std::span<const int32_t> values, pybind11::handle owner);

/// A read-only NumPy array that owns `values`.
pybind11::array int_array(std::vector<int32_t> values);

}  // namespace cpattn::bindings
