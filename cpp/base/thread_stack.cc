// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/thread_stack.h"

#include <pthread.h>

#include <cstdint>
#include <stdexcept>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

struct Stack {
  uintptr_t begin = 0, end = 0;
};

Stack stack_of_this_thread() {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {};
  void* begin = nullptr;
  std::size_t size = 0;
  const bool known = pthread_attr_getstack(&attributes, &begin, &size) == 0;
  pthread_attr_destroy(&attributes);
  if (!known) return {};
  const auto address = reinterpret_cast<uintptr_t>(begin);
  return {address, address + size};
}

/// The stack of the main thread is read from a file of the system, so it is kept.
thread_local Stack stack = stack_of_this_thread();

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
