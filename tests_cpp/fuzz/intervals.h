// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace cpattn::fuzz {

/// Ranges of addresses, of one byte or more each.
class Intervals {
 public:
  void add(uint64_t addr, uint64_t size) { ranges_.emplace_back(addr, addr + (size - 1)); }

  /// Whether no two have a byte in common, and none passes the last address.
  bool are_disjoint() {
    std::sort(ranges_.begin(), ranges_.end());
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
      if (ranges_[i].second < ranges_[i].first) return false;
      if (i > 0 && ranges_[i].first <= ranges_[i - 1].second) return false;
    }
    return true;
  }

 private:
  std::vector<std::pair<uint64_t, uint64_t>> ranges_;  // first and last
};

}  // namespace cpattn::fuzz
