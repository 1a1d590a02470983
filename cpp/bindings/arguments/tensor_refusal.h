// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/arguments/argument_error.h"

namespace cpattn::bindings {

/// Whether it is a masked array of NumPy.
bool is_masked(pybind11::handle object);

/// TypeError for a masked array, whose mask nothing here would see.
void refuse_masked(pybind11::handle object, const ArgumentName& name);

/// TypeError for what is no tensor at all.
[[noreturn]] void refuse_other_types(pybind11::handle object, const ArgumentName& name);

/// TypeError for a tensor on another device, by its DLPack number.
[[noreturn]] void refuse_device(
    pybind11::handle object, const ArgumentName& name, int32_t device_type
);

/// TypeError for another dtype. `rule`, if not null, says which ones are taken.
[[noreturn]] void refuse_dtype(
    pybind11::handle object, const ArgumentName& name, const std::string& dtype, const char* rule
);

/// TypeError for a tensor of torch that has no plain memory to look at: a meta, nested, sparse or
/// quantised one.
[[noreturn]] void refuse_torch_kind(pybind11::handle object, const ArgumentName& name);

}  // namespace cpattn::bindings
