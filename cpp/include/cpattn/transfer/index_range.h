// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

namespace cpattn {

/// The indices begin, ..., end - 1: of tokens, layers, heads or entries of a list.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;

  int64_t size() const { return end > begin ? end - begin : 0; }
  bool contains(int64_t i) const { return i >= begin && i < end; }
  bool operator==(const IndexRange&) const = default;
};

inline IndexRange intersect(IndexRange a, IndexRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

inline std::ostream& operator<<(std::ostream& out, IndexRange range) {
  return out << "[" << range.begin << ", " << range.end << ")";
}

}  // namespace cpattn
