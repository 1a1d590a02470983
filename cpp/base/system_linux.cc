// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <vector>

#include "cpattn/base/system.h"

#if !defined(SYS_pidfd_open)
#define SYS_pidfd_open 434  // of every architecture; headers before Linux 5.3 lack it
#endif
#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // headers before Linux 5.14 lack it
#endif

namespace cpattn::system {

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 0;
}

int64_t thread_id() { return syscall(SYS_gettid); }

void name_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

Stack stack_of_this_thread() {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return {};
  void* begin = nullptr;
  std::size_t size = 0;
  const bool known = pthread_attr_getstack(&attributes, &begin, &size) == 0;
  pthread_attr_destroy(&attributes);
  if (!known) return {};
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + size;
#if !defined(__GLIBC__)
  // musl returns the mapped part of the main thread's stack, which grows up to the limit.
  rlimit limit{};
  if (getpid() == thread_id() && getrlimit(RLIMIT_STACK, &limit) == 0) {
    size = std::min<std::size_t>(std::max<rlim_t>(size, limit.rlim_cur), end);
  }
#endif
  return {end - size, end};
}

bool has_arm_bf16() {
#if defined(__aarch64__)
  constexpr unsigned long kHwcap2Bf16 = 1UL << 14;  // older headers lack HWCAP2_BF16
  return (getauxval(AT_HWCAP2) & kHwcap2Bf16) != 0 && (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

bool request_tiles() {
#if defined(__x86_64__)
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
#else
  return false;
#endif
}

// FUTEX_PRIVATE_FLAG is left out, because processes share the word.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds longest) {
  const timespec time{.tv_sec = 0, .tv_nsec = longest.count()};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &time, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int open_process(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

void advise_huge_pages(void* data, std::size_t num_bytes) {
  madvise(data, num_bytes, MADV_HUGEPAGE);
}

int place_on_nodes(void* data, std::size_t num_bytes, std::span<const int> nodes) {
  constexpr int kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(std::ranges::max(nodes) / kBits + 1);
  for (const int node : nodes) mask[node / kBits] |= 1UL << (node % kBits);
  const int mode = nodes.size() == 1 ? MPOL_BIND : MPOL_INTERLEAVE;
  const std::size_t bits = mask.size() * kBits + 1;  // the kernel takes one less
  return syscall(SYS_mbind, data, num_bytes, mode, mask.data(), bits, 0) == 0 ? 0 : errno;
}

int take_memory(void* data, std::size_t num_bytes, int fd, int64_t offset) {
  const int error = madvise(data, num_bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
  if (error != EINVAL) return error;
  return posix_fallocate(fd, offset, static_cast<off_t>(num_bytes));  // Linux before 5.14
}

}  // namespace cpattn::system
