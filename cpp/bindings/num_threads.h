// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "cpattn/check.h"

namespace cpattn::bindings {

/// The argument num_threads of a function, as the core wants it: 0 for the default.
inline int parse_threads(const char* function, std::optional<int> num_threads) {
  check(
      !num_threads || *num_threads >= 1, function, ": num_threads must be >= 1, got ",
      num_threads.value_or(0)
  );
  return num_threads.value_or(0);
}

}  // namespace cpattn::bindings
