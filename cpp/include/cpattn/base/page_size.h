// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpattn/base/check.h"

namespace cpattn {

/// Tokens of a page: at most 2^31 - 1, so that products with numbers of tokens and pages fit
/// into int64. Throws std::invalid_argument in the name of `function`.
inline void check_page_size(const char* function, int64_t page_size) {
  check(
      page_size >= 1 && page_size <= INT32_MAX, function, ": page_size must be in [1, ", INT32_MAX,
      "], got ", page_size
  );
}

/// Tokens that a row of so many page ids has room for, at most 2^62: a row that is broadcast may
/// have any number of columns. page_size is one that check_page_size() passes.
inline int64_t tokens_per_row(int64_t columns, int64_t page_size) {
  return std::min<int64_t>(columns, INT32_MAX) * page_size;
}

}  // namespace cpattn
