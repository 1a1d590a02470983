// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>

namespace cpattn {

/// Memory that a transfer engine may touch: disjoint ranges of addresses. A call changes all ranges
/// that it names or, if it returns a code, none. Codes are those of the Mooncake transfer engine.
/// Lists of unequal length throw std::invalid_argument.
class MemoryRanges {
 public:
  static constexpr int kInvalid = -1;  // an empty range, or one beyond the last address
  static constexpr int kUnknown = -3;  // no range starts there
  static constexpr int kOverlap = -7;  // bytes that are registered already, or twice in the call

  /// Adds [addrs[i], addrs[i] + sizes[i]) for every i. Returns 0 or a code.
  int add(std::span<const uint64_t> addrs, std::span<const uint64_t> sizes);

  /// Removes the ranges that start at the addresses. Returns 0 or a code.
  int remove(std::span<const uint64_t> addrs);

  /// Whether every block lies inside one range; adjacent ranges do not join. A block of no bytes
  /// lies anywhere.
  bool contain(std::span<const uint64_t> addrs, std::span<const uint64_t> lengths) const;

 private:
  std::map<uint64_t, uint64_t> last_of_;  // from the first address of a range to its last one
};

}  // namespace cpattn
