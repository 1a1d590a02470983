// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace cpattn {

/// What running sums of lengths have to be, beside never decreasing.
struct PrefixSumRule {
  bool leading_zero = false;   // n + 1 of them, the first 0; else n, the first a length
  bool reaches_total = false;  // the last is `total`; else none is above it
  int64_t total = 0;
  const char* total_name = "";  // in messages: "the number of packed rows"
};

/// Throws std::invalid_argument in the name of `function` and `name`, with the value and its
/// index, unless the sums follow the rule. Afterwards every one of them is in [0, total].
void check_prefix_sums(
    const char* function, const char* name, std::span<const int64_t> sums, const PrefixSumRule& rule
);

}  // namespace cpattn
