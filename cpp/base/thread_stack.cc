// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/thread_stack.h"

#include <cstdint>
#include <stdexcept>

#include "cpattn/base/check.h"
#include "cpattn/base/system.h"

namespace cpattn {
namespace {

/// The stack of the main thread is read from a file of the system, so it is kept.
thread_local system::Stack stack = system::stack_of_this_thread();

}  // namespace

void check_stack(const char* function) {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (here < stack.begin || here >= stack.end) return;
  const std::size_t free = here - stack.begin;
  if (free >= kLeastStack) return;
  throw std::runtime_error(concat(
      function, ": needs ", kLeastStack >> 10, " KiB of stack, and this thread has ", free >> 10,
      " KiB left: its stack is too small, or calls in signal handlers are nested too deep"
  ));
}

}  // namespace cpattn
