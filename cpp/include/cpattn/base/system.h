// SPDX-License-Identifier: Apache-2.0
// Systems have these under names of their own: another one needs a file like system_linux.cc alone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cpattn::system {

/// CPUs that this process may run on; 0 where the system does not say.
int usable_cpus();

/// A number of the calling thread that tools of the system show, too.
int64_t thread_id();

/// Names the calling thread for debuggers and profilers.
void name_thread(const char* name);

struct Stack {
  uintptr_t begin = 0, end = 0;
};

/// The stack of the calling thread; empty where the system does not say.
Stack stack_of_this_thread();

/// Whether the processor is one of Arm with BF16 and DotProd.
bool has_arm_bf16();

/// Whether this process may use tiles of AMX, for which it asks.
bool request_tiles();

/// Waits at most so long while a word, which processes may share, has a value. May return early.
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::chrono::nanoseconds longest);
void wake_all(std::atomic<uint32_t>& word);

/// A descriptor that poll finds readable once the process has ended; -1 and errno if there is none.
int open_process(int pid);

/// Asks for huge pages, where the system has them on request.
void advise_huge_pages(void* data, std::size_t num_bytes);

/// Places the pages of memory that nobody wrote to yet on NUMA nodes, by turns where there are
/// several; returns 0 or a value of errno.
int place_on_nodes(void* data, std::size_t num_bytes, std::span<const int> nodes);

/// Finds the memory of a mapped part of a file now; returns 0 or a value of errno.
int take_memory(void* data, std::size_t num_bytes, int fd, int64_t offset);

}  // namespace cpattn::system
