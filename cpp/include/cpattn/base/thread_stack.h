// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace cpattn {

/// Stack of each thread of the pool, in bytes.
inline constexpr std::size_t kWorkerStack = std::size_t{2} << 20;

/// Free stack that attention needs on the calling thread, in bytes. The largest frame, with a block
/// of keys, has 89 KiB.
inline constexpr std::size_t kLeastStack = std::size_t{112} << 10;

/// Throws std::runtime_error, which names `function`, if the calling thread has less than
/// kLeastStack left: its stack is small, or signal handlers that call the library are nested too
/// deep. A stack that the system did not give the thread counts as large enough.
void check_stack(const char* function);

}  // namespace cpattn
