// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

namespace cpattn {

inline int64_t sum_of(std::span<const int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// The largest of the counts, 0 for none.
inline int64_t most_of(std::span<const int64_t> counts) {
  return counts.empty() ? 0 : *std::ranges::max_element(counts);
}

}  // namespace cpattn
