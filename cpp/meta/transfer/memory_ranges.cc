// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/memory_ranges.h"

#include <cstddef>
#include <iterator>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {

int MemoryRanges::add(std::span<const uint64_t> addrs, std::span<const uint64_t> sizes) {
  check(
      addrs.size() == sizes.size(), "MemoryRanges.add: addrs and sizes must be equally many, got ",
      addrs.size(), " and ", sizes.size()
  );
  auto ranges = last_of_;
  for (std::size_t i = 0; i < addrs.size(); ++i) {
    const uint64_t first = addrs[i], last = first + sizes[i] - 1;
    if (sizes[i] == 0 || last < first) return kInvalid;
    const auto next = ranges.upper_bound(last);  // starts after this range
    if (next != ranges.begin() && std::prev(next)->second >= first) return kOverlap;
    ranges.emplace_hint(next, first, last);
  }
  last_of_ = std::move(ranges);
  return 0;
}

int MemoryRanges::remove(std::span<const uint64_t> addrs) {
  auto ranges = last_of_;
  for (const uint64_t addr : addrs) {
    if (ranges.erase(addr) == 0) return kUnknown;
  }
  last_of_ = std::move(ranges);
  return 0;
}

bool MemoryRanges::contain(
    std::span<const uint64_t> addrs, std::span<const uint64_t> lengths
) const {
  check(
      addrs.size() == lengths.size(),
      "MemoryRanges.contain: addrs and lengths must be equally many, got ", addrs.size(), " and ",
      lengths.size()
  );
  uint64_t first = 1, last = 0;  // the range of the previous block, often that of the next, too
  for (std::size_t i = 0; i < addrs.size(); ++i) {
    if (lengths[i] == 0) continue;
    const uint64_t end = addrs[i] + lengths[i] - 1;
    if (end < addrs[i]) return false;
    if (addrs[i] < first || end > last) {
      const auto behind = last_of_.upper_bound(addrs[i]);
      if (behind == last_of_.begin()) return false;
      first = std::prev(behind)->first;
      last = std::prev(behind)->second;
      if (end > last) return false;
    }
  }
  return true;
}

}  // namespace cpattn
