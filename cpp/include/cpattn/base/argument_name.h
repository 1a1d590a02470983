// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>

namespace cpattn {

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

inline std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
  if (name.function != nullptr) out << name.function << ": ";
  return out << name.argument;
}

}  // namespace cpattn
