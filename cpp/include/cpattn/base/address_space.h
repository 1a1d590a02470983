// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace cpattn {

/// A snapshot of the addresses that this process can read and write.
class AddressSpace {
 public:
  /// Reads /proc/self/maps. Throws std::runtime_error, which names `function`, where the system has
  /// no such file.
  static AddressSpace now(const char* function);

  /// Returns the first address of [addr, addr + size) that cannot be both read and written, or none
  /// if all can. addr + size must be at most 2^64.
  std::optional<uint64_t> find_gap(uint64_t addr, uint64_t size) const;

 private:
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  std::vector<Range> ranges_;  // ascending; adjacent ranges are joined
};

}  // namespace cpattn
