// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/pool_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/system.h"

namespace cpattn {
namespace {

constexpr int64_t kLargePage = int64_t{2} << 20;
constexpr int64_t kTakenAtOnce = int64_t{64} << 20;  // between checks for Ctrl-C, some milliseconds

class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

struct Live {
  uint64_t last = 0;  // address
  std::weak_ptr<PoolMemory> memory;
};

/// The memory of all pools, by its first address.
struct LiveMemory {
  std::mutex mutex;
  std::map<uint64_t, Live> from;
};

// Made when the library is loaded, since a fork while a thread makes it would leave a child that
// waits for that thread. Never freed: pools may live until the very end.
LiveMemory& live = []() -> LiveMemory& {
  static auto* const made = new LiveMemory;
  // A fork waits for the other threads, which could not unlock the child's mutex.
  const auto unlock = [] { made->mutex.unlock(); };
  pthread_atfork([] { made->mutex.lock(); }, unlock, unlock);
  return *made;
}();

std::string error_text(int error) { return std::generic_category().message(error); }

/// Checks each part and returns the bytes of all parts.
int64_t checked_bytes(const char* function, std::span<const SharedPart> parts) {
  check(!parts.empty(), function, ": shared memory must have a part");
  const int64_t page = sysconf(_SC_PAGESIZE);
  int64_t sum = 0;
  for (const SharedPart& part : parts) {
    check(
        part.num_bytes > 0 && part.offset >= 0 && part.num_bytes % page == 0 &&
            part.offset % page == 0,
        function, ": parts of shared memory must be multiples of ", page, " bytes, got ",
        part.num_bytes, " bytes at ", part.offset
    );
    int64_t end = 0;
    check(
        !__builtin_add_overflow(part.offset, part.num_bytes, &end) &&
            !__builtin_add_overflow(sum, part.num_bytes, &sum),
        function, ": shared memory must be below 2^63 bytes"
    );
    struct stat file{};
    const bool is_file = fstat(part.fd, &file) == 0;
    check(
        is_file && file.st_size >= end, function, ": a file of shared memory must have ", end,
        " bytes, got ", is_file ? file.st_size : 0
    );
  }
  return sum;
}

/// Reserves address space from the begin of a large page, without memory.
char* reserve(const char* function, int64_t num_bytes) {
  const int64_t more = num_bytes > INT64_MAX - kLargePage ? 0 : kLargePage;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const data = mmap(nullptr, num_bytes + more, PROT_NONE, kFlags, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfMemory(concat(function, ": the system has no ", num_bytes, " bytes for a buffer"));
  }
  char* const begin = static_cast<char*>(data);
  const int64_t before = -reinterpret_cast<intptr_t>(begin) & (kLargePage - 1);
  if (before > 0) munmap(begin, before);
  if (before < more) munmap(begin + before + num_bytes, more - before);
  return begin + before;
}

/// Makes the system allocate the memory of a part now, near this thread. A later failure would be a
/// signal that ends the process.
void take(const char* function, char* data, const SharedPart& part) {
  for (int64_t done = 0; done < part.num_bytes; done += kTakenAtOnce) {
    if (interrupt_requested()) throw Interrupted();
    const int64_t size = std::min(kTakenAtOnce, part.num_bytes - done);
    const int error = system::take_memory(data + done, size, part.fd, part.offset + done);
    if (error != 0) {
      throw OutOfMemory(concat(
          function, ": the system has no ", part.num_bytes,
          " bytes of shared memory: ", error_text(error)
      ));
    }
  }
}

void place(const char* function, const PoolMemory& memory, std::span<const int> nodes) {
  const int error = system::place_on_nodes(memory.data(), memory.num_bytes(), nodes);
  if (error == 0) return;
  std::string names;
  for (const int node : nodes) names += concat(names.empty() ? "" : ", ", node);
  throw std::runtime_error(concat(
      function, ": the system does not place memory on NUMA nodes ", names, ": ", error_text(error),
      error == EPERM ? " (containers need the capability SYS_NICE)" : ""
  ));
}

}  // namespace

std::shared_ptr<PoolMemory> PoolMemory::make(
    const char* function, int64_t num_bytes, std::span<const int> nodes
) {
  constexpr int kMostNodes = 1024;  // of Linux
  for (const int node : nodes) {
    check(
        node >= 0 && node < kMostNodes, function, ": NUMA nodes must be in [0, ", kMostNodes,
        "), got ", node
    );
  }
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const data = mmap(nullptr, num_bytes, kProtection, kFlags, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfMemory(concat(function, ": the system has no ", num_bytes, " bytes for a buffer"));
  }
  std::shared_ptr<PoolMemory> memory(new PoolMemory(static_cast<char*>(data), num_bytes));
  system::advise_huge_pages(data, num_bytes);  // else pages are small
  if (!nodes.empty()) place(function, *memory, nodes);
  return remember(std::move(memory));
}

std::shared_ptr<PoolMemory> PoolMemory::map(
    const char* function, std::span<const SharedPart> parts
) {
  const int64_t num_bytes = checked_bytes(function, parts);
  char* const data = reserve(function, num_bytes);
  std::shared_ptr<PoolMemory> memory(new PoolMemory(data, num_bytes));
  char* at = data;
  for (const SharedPart& part : parts) {
    constexpr int kProtection = PROT_READ | PROT_WRITE;
    if (mmap(at, part.num_bytes, kProtection, MAP_SHARED | MAP_FIXED, part.fd, part.offset) ==
        MAP_FAILED) {
      throw OutOfMemory(
          concat(function, ": the system maps no ", part.num_bytes, " bytes: ", error_text(errno))
      );
    }
    at += part.num_bytes;
  }
  system::advise_huge_pages(
      data, num_bytes
  );  // before memory is taken, because this decides about its pages
  at = data;
  for (const SharedPart& part : parts) {
    if (part.own) take(function, at, part);
    at += part.num_bytes;
  }
  return remember(std::move(memory));
}

std::shared_ptr<PoolMemory> PoolMemory::remember(std::shared_ptr<PoolMemory> memory) {
  const std::scoped_lock lock(live.mutex);
  live.from[memory->addr()] = {memory->addr() + (memory->num_bytes() - 1), memory};
  return memory;
}

PoolMemory::~PoolMemory() {
  {
    const std::scoped_lock lock(live.mutex);
    live.from.erase(addr());
  }
  munmap(data_, num_bytes_);  // from here on the system may give the addresses to others
}

std::vector<std::shared_ptr<PoolMemory>> PoolMemory::find(uint64_t addr, uint64_t size) {
  std::vector<std::shared_ptr<PoolMemory>> found;  // outlives the lock, which release takes too
  if (size == 0) return found;
  const uint64_t last = addr + (size - 1);
  const std::scoped_lock lock(live.mutex);
  auto next = live.from.upper_bound(addr);
  if (next != live.from.begin()) --next;  // begins before the range and may reach into it
  for (; next != live.from.end() && next->first <= last; ++next) {
    if (next->second.last < addr) continue;
    found.emplace_back();
    found.back() = next->second.memory.lock();
    if (!found.back()) found.pop_back();  // its last owner is just releasing it
  }
  return found;
}

}  // namespace cpattn
