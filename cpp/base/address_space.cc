// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/address_space.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <stdexcept>
#include <string>

#include "cpattn/base/check.h"

namespace cpattn {

AddressSpace AddressSpace::now(const char* function) {
  std::ifstream file("/proc/self/maps");
  if (!file) {
    throw std::runtime_error(
        concat(function, ": /proc/self/maps cannot be read, which says what memory there is")
    );
  }
  AddressSpace space;
  for (std::string line; std::getline(file, line);) {  // 7f0a1000-7f0b2000 rw-p ...
    Range range;
    const char* const end = line.data() + line.size();
    const auto begin = std::from_chars(line.data(), end, range.begin, 16);
    if (begin.ptr == end) continue;
    const auto behind = std::from_chars(begin.ptr + 1, end, range.end, 16);
    if (end - behind.ptr < 3 || behind.ptr[1] != 'r' || behind.ptr[2] != 'w') continue;
    if (!space.ranges_.empty() && space.ranges_.back().end == range.begin) {
      space.ranges_.back().end = range.end;
    } else {
      space.ranges_.push_back(range);
    }
  }
  return space;
}

std::optional<uint64_t> AddressSpace::find_gap(uint64_t addr, uint64_t size) const {
  if (size == 0) return std::nullopt;
  const auto behind = std::upper_bound(
      ranges_.begin(), ranges_.end(), addr,
      [](uint64_t value, const Range& range) { return value < range.begin; }
  );
  if (behind == ranges_.begin()) return addr;
  const uint64_t end = (behind - 1)->end;
  if (end <= addr) return addr;
  return size - 1 < end - addr ? std::nullopt : std::optional(end);
}

}  // namespace cpattn
