// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace cpattn {

/// The rule that running sums of lengths follow, besides never decreasing.
struct PrefixSumRule {
  bool leading_zero = false;   // there are n + 1 sums, the first 0; else n, the first a length
  bool reaches_total = false;  // the last sum is `total`; else no sum is above `total`
  int64_t total = 0;
  const char* total_name = "";  // in messages: "the number of packed rows"
};

/// Throws std::invalid_argument in the name of `function` and `name`, with the value and its
/// index, unless the sums follow the rule. Once it returns, every sum is known to be in [0, total].
void check_prefix_sums(
    const char* function, const char* name, std::span<const int64_t> sums, const PrefixSumRule& rule
);

}  // namespace cpattn
