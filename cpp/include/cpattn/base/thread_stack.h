// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace cpattn {

/// Stack of each thread of the pool.
inline constexpr std::size_t kWorkerStack = std::size_t{2} << 20;

/// Free stack that attention needs of its caller. The largest frame, with a block of keys, has
/// 89 KiB.
inline constexpr std::size_t kLeastStack = std::size_t{112} << 10;

/// Throws std::runtime_error, which names `function`, if the calling thread has less than
/// kLeastStack left: its stack is small, or signal handlers that call the library are nested too
/// deep. A stack that is not the one the system gave the thread counts as large enough.
void check_stack(const char* function);

}  // namespace cpattn
