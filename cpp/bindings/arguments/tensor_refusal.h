// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/arguments/argument_error.h"

namespace cpattn::bindings {

/// Whether an object is a masked array of NumPy.
bool is_masked(pybind11::handle object);

/// Refuses a masked array by TypeError, because its mask would be ignored.
void refuse_masked(pybind11::handle object, const ArgumentName& name);

/// Refuses an object that is no tensor, by TypeError.
[[noreturn]] void refuse_other_types(pybind11::handle object, const ArgumentName& name);

/// Refuses a tensor on another device, given by its DLPack number, by TypeError.
[[noreturn]] void refuse_device(
    pybind11::handle object, const ArgumentName& name, int32_t device_type
);

/// Refuses another dtype by TypeError. `rule`, if not null, names the dtypes that are taken.
[[noreturn]] void refuse_dtype(
    pybind11::handle object, const ArgumentName& name, const std::string& dtype, const char* rule
);

/// Refuses, by TypeError, a tensor of torch without plain memory: a meta, nested, sparse or
/// quantised one.
[[noreturn]] void refuse_torch_kind(pybind11::handle object, const ArgumentName& name);

}  // namespace cpattn::bindings
