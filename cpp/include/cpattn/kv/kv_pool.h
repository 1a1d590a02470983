// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cpattn/base/tensor_view.h"
#include "cpattn/kv/pool_memory.h"

namespace cpattn {

/// One kind of entry of a KV pool - keys, values or keys of an indexer - for all layers:
/// shape [num_layers, num_slots, row_elements] without gaps, in memory of its own or shared by the
/// processes of a group. With the large pages of PoolMemory, rows at random slots find their
/// addresses in the TLB. (32768 rows of K and V, shuffled, two threads: casts to FP8 go from 26-39
/// to 51 GB/s, copies stay at 56.)
class KVBuffer {
 public:
  /// All sizes are >= 1. Throws std::invalid_argument, which names `function`, if they are not
  /// or if their product exceeds 2^63 - 1 bytes, and a std::bad_alloc with the requested size if
  /// the system lacks address space. `nodes` are those of PoolMemory::make.
  KVBuffer(
      const char* function,
      int64_t num_layers,
      int64_t num_slots,
      int64_t row_elements,
      DType dtype,
      std::span<const int> nodes = {}
  );
  /// Places the buffer in `memory`, which must not be smaller.
  KVBuffer(
      const char* function,
      int64_t num_layers,
      int64_t num_slots,
      int64_t row_elements,
      DType dtype,
      std::shared_ptr<PoolMemory> memory
  );
  KVBuffer(const KVBuffer&) = delete;
  KVBuffer& operator=(const KVBuffer&) = delete;

  char* data() const { return memory_->data(); }
  int64_t num_bytes() const { return num_layers_ * layer_bytes(); }
  int64_t layer_bytes() const { return num_slots_ * row_bytes(); }
  int64_t row_bytes() const { return row_elements_ * element_size(dtype_); }

  int64_t num_layers() const { return num_layers_; }
  int64_t num_slots() const { return num_slots_; }
  int64_t row_elements() const { return row_elements_; }
  DType dtype() const { return dtype_; }

 private:
  int64_t num_layers_, num_slots_, row_elements_;
  DType dtype_;
  std::shared_ptr<PoolMemory> memory_;
};

}  // namespace cpattn
