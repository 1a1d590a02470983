// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/base/check.h"

namespace cpattn {

/// The keys around a token at position p: j with p - left <= j <= p + right. A side without a
/// number has no limit.
struct KeyWindow {
  std::optional<int64_t> left, right;
};

/// Throws std::invalid_argument for numbers below 0.
inline void check_key_window(const char* function, const std::optional<KeyWindow>& window) {
  if (!window) return;
  for (const std::optional<int64_t>& side : {window->left, window->right}) {
    check(
        side.value_or(0) >= 0, function, ": window must be >= 0 (0: a token sees itself), got ",
        side.value_or(0)
    );
  }
}

}  // namespace cpattn
