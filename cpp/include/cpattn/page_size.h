// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/check.h"

namespace cpattn {

/// Tokens of a page: at most 2^31 - 1, so that products with numbers of tokens and pages fit
/// into int64. Throws std::invalid_argument in the name of `function`.
inline void check_page_size(const char* function, int64_t page_size) {
  check(
      page_size >= 1 && page_size <= INT32_MAX, function, ": page_size must be in [1, ", INT32_MAX,
      "], got ", page_size
  );
}

}  // namespace cpattn
