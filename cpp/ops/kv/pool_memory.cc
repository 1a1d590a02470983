// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/pool_memory.h"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

class OutOfAddressSpace final : public std::bad_alloc {
 public:
  explicit OutOfAddressSpace(std::string message) : message_(std::move(message)) {}
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

LiveMemory& live_memory() {
  static auto* const memory = new LiveMemory;  // never freed: pools may live until the very end
  return *memory;
}

}  // namespace

std::shared_ptr<PoolMemory> PoolMemory::make(const char* function, int64_t num_bytes) {
  constexpr int kProtection = PROT_READ | PROT_WRITE;
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const data = mmap(nullptr, num_bytes, kProtection, kFlags, -1, 0);
  if (data == MAP_FAILED) {
    throw OutOfAddressSpace(
        concat(function, ": the system has no ", num_bytes, " bytes for a buffer")
    );
  }
  madvise(data, num_bytes, MADV_HUGEPAGE);  // where the system has none, small pages do
  std::shared_ptr<PoolMemory> memory(new PoolMemory(static_cast<char*>(data), num_bytes));
  LiveMemory& live = live_memory();
  const std::scoped_lock lock(live.mutex);
  live.from[memory->addr()] = {memory->addr() + (num_bytes - 1), memory};
  return memory;
}

PoolMemory::~PoolMemory() {
  {
    LiveMemory& live = live_memory();
    const std::scoped_lock lock(live.mutex);
    live.from.erase(addr());
  }
  munmap(data_, num_bytes_);  // from here on the system may give the addresses to others
}

std::vector<std::shared_ptr<PoolMemory>> PoolMemory::find(uint64_t addr, uint64_t size) {
  std::vector<std::shared_ptr<PoolMemory>> found;  // outlives the lock, which letting go takes too
  if (size == 0) return found;
  const uint64_t last = addr + (size - 1);
  LiveMemory& live = live_memory();
  const std::scoped_lock lock(live.mutex);
  auto next = live.from.upper_bound(addr);
  if (next != live.from.begin()) --next;  // begins before the range and may reach into it
  for (; next != live.from.end() && next->first <= last; ++next) {
    if (next->second.last < addr) continue;
    found.emplace_back();
    found.back() = next->second.memory.lock();
    if (!found.back()) found.pop_back();  // its last owner is just letting go
  }
  return found;
}

}  // namespace cpattn
