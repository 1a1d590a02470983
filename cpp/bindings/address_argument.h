// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace cpattn::bindings {

/// A list or tuple of int from 0 to 2^64 - 1, or an integer array (anything with tolist()).
/// Others are TypeError, other values ValueError. `name` reads "function: argument".
std::vector<uint64_t> address_list(pybind11::handle object, const char* name);

}  // namespace cpattn::bindings
