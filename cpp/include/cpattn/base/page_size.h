// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpattn/base/check.h"

namespace cpattn {

/// Throws std::invalid_argument, which names `function`, unless page_size, the tokens of a page, is
/// from 1 to 2^31 - 1. Then its products with numbers of tokens and pages fit into int64.
inline void check_page_size(const char* function, int64_t page_size) {
  check(
      page_size >= 1 && page_size <= INT32_MAX, function, ": page_size must be in [1, ", INT32_MAX,
      "], got ", page_size
  );
}

/// The tokens that a row of `columns` page ids has room for. At most 2^31 - 1 columns are counted,
/// because a broadcast row may have any number. page_size has passed check_page_size().
inline int64_t tokens_per_row(int64_t columns, int64_t page_size) {
  return std::min<int64_t>(columns, INT32_MAX) * page_size;
}

}  // namespace cpattn
