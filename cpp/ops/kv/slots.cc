// SPDX-License-Identifier: Apache-2.0
#include "ops/kv/slots.h"

#include <algorithm>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"

namespace cpattn {

bool check_slots(
    const char* function, const char* name, std::span<const int64_t> slots, int64_t num_slots
) {
  bool ascending = true;
  int64_t last = -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    check(
        slot >= -1 && slot < num_slots, function, ": ", name, " must be in [-1, ", num_slots,
        "), got ", slot, " at index ", i
    );
    if (slot < 0) continue;
    ascending &= slot > last;
    last = slot;
  }
  return ascending;
}

void keep_last(const char* function, std::span<int64_t> slots) {
  const auto [low, high] = std::minmax_element(slots.begin(), slots.end());
  const int64_t first = std::max<int64_t>(*low, 0);
  const int64_t num_words = (*high - first) / 64 + 1;
  auto* const seen = static_cast<uint64_t*>(thread_scratch(function, num_words * sizeof(uint64_t)));
  std::fill_n(seen, num_words, 0);
  for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) {
    if (*slot < 0) continue;
    uint64_t& word = seen[(*slot - first) / 64];
    const uint64_t bit = uint64_t{1} << (*slot - first) % 64;
    if ((word & bit) != 0) *slot = -1;
    word |= bit;
  }
}

}  // namespace cpattn
