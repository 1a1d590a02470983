// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

namespace cpattn {

/// Checks that slots, the argument `name`, are -1 or below num_slots. Returns whether slots ascend,
/// so that none comes twice.
bool check_slots(
    const char* function, const char* name, std::span<const int64_t> slots, int64_t num_slots
);

/// Replaces slots that come again later by -1; the rest may then be written in any order. Throws a
/// std::bad_alloc that names `function`.
void keep_last(const char* function, std::span<int64_t> slots);

}  // namespace cpattn
