// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/arguments/argument_error.h"
#include "cpattn/context_parallel/forward_mode.h"

namespace cpattn::bindings {

/// A ForwardMode or its number, or None. Another number is ValueError, anything else
/// TypeError.
std::optional<ForwardMode> optional_mode(pybind11::handle mode, const ArgumentName& name);

}  // namespace cpattn::bindings
