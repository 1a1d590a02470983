// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace cpattn::bindings {

/// An int or NumPy integer scalar in [0, 2^64), such as an address. TypeError for anything
/// else, bool and float included, and ValueError beyond. `name` reads "function: argument".
uint64_t uint64_value(pybind11::handle object, const char* name);

/// A list or tuple of such values, or a one-dimensional integer array of NumPy or torch.
std::vector<uint64_t> uint64_list(pybind11::handle object, const char* name);

}  // namespace cpattn::bindings
