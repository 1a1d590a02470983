// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace cpattn {

/// The memory of a buffer of a KV pool: zeros, aligned to a page of the system, committed when
/// they are first written, 2 MiB at a time where the system has large pages. The pool and every
/// engine that peers reach it through share it, and it goes when the last of them lets go.
class PoolMemory {
 public:
  /// num_bytes >= 1. Throws a std::bad_alloc that names `function` and says how much was asked for
  /// if the system has no such address space.
  static std::shared_ptr<PoolMemory> make(const char* function, int64_t num_bytes);

  /// Returns all memory of pools that has a byte in [addr, addr + size), in ascending order. A
  /// process finds its pools by their addresses, which are all that engines are told.
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

  char* data_;
  int64_t num_bytes_;
};

}  // namespace cpattn
