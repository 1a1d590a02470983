// SPDX-License-Identifier: Apache-2.0
// This file is compiled by clang for macOS, but has never been run.
#include <pthread.h>
#include <sys/event.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

#include "cpattn/base/system.h"

namespace cpattn::system {

int usable_cpus() { return 0; }

int64_t thread_id() {
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return static_cast<int64_t>(id);
}

void name_thread(const char* name) { pthread_setname_np(name); }

Stack stack_of_this_thread() {
  const auto end = reinterpret_cast<uintptr_t>(pthread_get_stackaddr_np(pthread_self()));
  return {end - pthread_get_stacksize_np(pthread_self()), end};
}

bool has_arm_bf16() {
  const auto has = [](const char* feature) {
    int value = 0;
    std::size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_DotProd");
}

bool request_tiles() { return false; }

// macOS before 14.4 has no call that waits for a word of several processes.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds longest) {
  constexpr timespec kLook{.tv_sec = 0, .tv_nsec = 50'000};
  const auto end = std::chrono::steady_clock::now() + longest;
  while (word.load() == value && std::chrono::steady_clock::now() < end) nanosleep(&kLook, nullptr);
}

void wake_all(std::atomic<uint32_t>&) {}

int open_process(int pid) {
  const int queue = kqueue();
  if (queue < 0) return -1;
  struct kevent exit{};
  EV_SET(&exit, pid, EVFILT_PROC, EV_ADD, NOTE_EXIT, 0, nullptr);
  if (kevent(queue, &exit, 1, nullptr, 0, nullptr) == 0) return queue;
  const int error = errno;
  close(queue);
  errno = error;
  return -1;
}

void advise_huge_pages(void*, std::size_t) {}

int place_on_nodes(void*, std::size_t, std::span<const int>) { return ENOTSUP; }

// No call tells whether there is memory, so pages are allocated by writing their own contents.
int take_memory(void* data, std::size_t num_bytes, int, int64_t) {
  const auto page = static_cast<std::size_t>(getpagesize());
  auto* const bytes = static_cast<volatile char*>(data);
  for (std::size_t i = 0; i < num_bytes; i += page) bytes[i] = bytes[i];
  return 0;
}

}  // namespace cpattn::system
