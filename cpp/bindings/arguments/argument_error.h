// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <iosfwd>
#include <string>

#include "cpattn/base/check.h"

namespace cpattn::bindings {

/// The beginning of a message about an argument, "paged_attention: q". It costs nothing until it
/// is printed.
struct ArgumentName {
  ArgumentName(const char* of_function, const char* of_argument)
      : function(of_function), argument(of_argument) {}
  /// A name that reads "function: argument" already.
  ArgumentName(const char* both) : argument(both) {}  // NOLINT: implicit by design

  const char* function = nullptr;
  const char* argument;
};
std::ostream& operator<<(std::ostream& out, const ArgumentName& name);

/// The name of an object's type, as messages have it.
std::string type_name(pybind11::handle object);

template <class... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
  throw pybind11::type_error(concat(parts...));
}

/// Raises TypeError(message), caused by the error that Python code of an argument has raised. A
/// MemoryError, and errors that are no Exception, such as KeyboardInterrupt, go on as they are.
[[noreturn]] void refuse_for_python_error(const std::string& message);

}  // namespace cpattn::bindings
