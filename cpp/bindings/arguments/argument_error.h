// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "cpattn/base/argument_name.h"
#include "cpattn/base/check.h"

namespace cpattn::bindings {

/// The name of an object's type, for messages.
std::string type_name(pybind11::handle object);

template <class... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
  throw pybind11::type_error(concat(parts...));
}

/// Raises TypeError(message), caused by the error that Python code of an argument has raised. A
/// MemoryError, and errors that are no Exception, such as KeyboardInterrupt, propagate unchanged.
[[noreturn]] void refuse_for_python_error(const std::string& message);

}  // namespace cpattn::bindings
