// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>

namespace cpattn {

/// The prefix of an error message about an argument, such as "paged_attention: q". The text is made
/// only when it is printed.
struct ArgumentName {
  ArgumentName(const char* of_function, const char* of_argument)
      : function(of_function), argument(of_argument) {}
  /// A prefix in the form "function: argument" already.
  ArgumentName(const char* both) : argument(both) {}  // NOLINT: implicit by design

  const char* function = nullptr;
  const char* argument;
};

inline std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
  if (name.function != nullptr) out << name.function << ": ";
  return out << name.argument;
}

}  // namespace cpattn
