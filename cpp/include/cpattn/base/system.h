// SPDX-License-Identifier: Apache-2.0
// Functions that each operating system names differently. A port needs only a file like
// system_linux.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cpattn::system {

/// CPUs that this process may run on; 0 where the system does not say.
int usable_cpus();

/// The number of the calling thread that tools of the system show.
int64_t thread_id();

/// Names the calling thread for debuggers and profilers.
void name_thread(const char* name);

struct Stack {
  uintptr_t begin = 0, end = 0;
};

/// The stack of the calling thread; empty where the system does not say.
Stack stack_of_this_thread();

/// Whether the processor is an Arm one with BF16 and DotProd.
bool has_arm_bf16();

/// Asks the system for AMX tiles and returns whether this process may use them.
bool request_tiles();

/// Waits at most `longest` while `word`, which processes may share, is `value`. May return early.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds longest);
void wake_all(std::atomic<uint32_t>& word);

/// A descriptor that poll finds readable once the process has ended; -1 and errno if there is none.
int open_process(int pid);

/// Asks for huge pages, where the system has them on request.
void advise_huge_pages(void* data, std::size_t num_bytes);

/// Places pages of memory that has not been written yet on NUMA nodes, in turn if there are
/// several; returns 0 or a value of errno.
int place_on_nodes(void* data, std::size_t num_bytes, std::span<const int> nodes);

/// Allocates the memory of a mapped part of a file now; returns 0 or a value of errno.
int take_memory(void* data, std::size_t num_bytes, int fd, int64_t offset);

}  // namespace cpattn::system
