// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "bindings/arguments/argument_error.h"

namespace cpattn::bindings {

/// An int or NumPy integer scalar in [0, 2^64), such as an address. TypeError for anything
/// else, bool and float included, and ValueError for other numbers.
uint64_t uint64_value(pybind11::handle object, const ArgumentName& name);

/// A list or tuple of such values, or a one-dimensional integer array of NumPy or torch; elements
/// of a list are those at the start of the call, even if reading them changes the list. TypeError
/// for anything else, masked arrays included.
std::vector<uint64_t> uint64_list(pybind11::handle object, const ArgumentName& name);

/// Blocks to copy: equally long lists, whose lengths add up to less than 2^64.
struct BlockLists {
  std::vector<uint64_t> src_addrs;
  std::vector<uint64_t> dst_addrs;
  std::vector<uint64_t> lengths;
};

/// The lists of a call, each read once: later changes of them have no effect. Errors name
/// `function` and the list.
BlockLists block_lists(
    const char* function,
    pybind11::handle src_addrs,
    pybind11::handle dst_addrs,
    pybind11::handle lengths
);

}  // namespace cpattn::bindings
