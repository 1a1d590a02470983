// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <span>

#include "cpattn/base/check.h"

namespace cpattn {

template <class Int>
double as_real(Int value) {
  return static_cast<double>(value);
}

/// Throws std::invalid_argument, in the name of `function`, if the product of the factors, a number
/// of bytes, might not fit into int64.
inline void check_bytes(const char* function, std::initializer_list<double> factors) {
  double bytes = 1;
  for (const double factor : factors) bytes *= std::max(factor, 1.0);
  check(bytes < 0x1p62, function, ": sizes must be of fewer than 2^62 bytes, got ", bytes);
}

inline int64_t sum_of(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// The largest of the counts, 0 for none.
inline int64_t most_of(std::span<const int64_t> counts) {
  return counts.empty() ? 0 : *std::ranges::max_element(counts);
}

}  // namespace cpattn
