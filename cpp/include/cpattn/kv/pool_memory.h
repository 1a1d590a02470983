// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace cpattn {

/// Bytes [offset, offset + num_bytes) of a file in memory, which other processes map, too.
struct SharedPart {
  int fd = -1;
  int64_t offset = 0;
  int64_t num_bytes = 0;
  bool own = false;  // this process allocates the memory, on its NUMA node
};

/// The memory of a buffer of a KV pool: zeros, aligned to a page of the system, committed on the
/// first write, 2 MiB at a time where the system has large pages. The pool and every engine through
/// which peers reach it share the memory; the last of them frees it.
class PoolMemory {
 public:
  /// num_bytes >= 1. Its pages come from the NUMA nodes, in turn if there are several; without
  /// nodes, from the node of the thread that first writes a page. If there are several, the system
  /// leaves out nodes that have no memory for this process.
  ///
  /// Throws a std::bad_alloc that names `function` and the requested size if the system lacks
  /// address space; std::invalid_argument for nodes below 0 or from 1024 on; and std::runtime_error
  /// if the system cannot place memory, or not on these nodes.
  static std::shared_ptr<PoolMemory> make(
      const char* function, int64_t num_bytes, std::span<const int> nodes = {}
  );

  /// Maps the parts, one after the other, for `function`. Own parts have their memory when this
  /// returns, 2 MiB at a time where the system has large pages for files in memory, so that writing
  /// to any byte cannot fail once all processes have mapped theirs. The caller may then close the
  /// files.
  ///
  /// Throws std::invalid_argument for no parts, and sizes and offsets that are no multiples of a
  /// page of the system or reach past the end of a file; a std::bad_alloc that names `function` if
  /// the system lacks address space or memory; and Interrupted when the caller's hook asks to stop.
  static std::shared_ptr<PoolMemory> map(const char* function, std::span<const SharedPart> parts);

  /// Returns all memory of pools that has a byte in [addr, addr + size), in ascending order.
  /// Engines know pools only by their addresses.
  static std::vector<std::shared_ptr<PoolMemory>> find(uint64_t addr, uint64_t size);

  ~PoolMemory();
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;

  char* data() const { return data_; }
  uint64_t addr() const { return reinterpret_cast<uint64_t>(data_); }
  int64_t num_bytes() const { return num_bytes_; }
  /// Whether [addr, addr + size) lies within.
  bool contains(uint64_t addr, uint64_t size) const {
    const auto num_bytes = static_cast<uint64_t>(num_bytes_);
    return addr >= this->addr() && size <= num_bytes && addr - this->addr() <= num_bytes - size;
  }

 private:
  PoolMemory(char* data, int64_t num_bytes) : data_(data), num_bytes_(num_bytes) {}
  static std::shared_ptr<PoolMemory> remember(std::shared_ptr<PoolMemory> memory);

  char* data_;
  int64_t num_bytes_;
};

}  // namespace cpattn
