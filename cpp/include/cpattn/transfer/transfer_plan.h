// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cpattn {

/// Units (pages, or token slots) that are consecutive on both sides.
struct TransferRun {
  int64_t src = 0;  // the first unit's index in the source buffers
  int64_t dst = 0;  // the first unit's index in the destination buffers
  int64_t count = 0;

  bool operator==(const TransferRun&) const = default;
};

/// A buffer of the source and the one of the destination that receives it. Unit i of a side
/// starts at addr + i * stride; `bytes` of it are sent, at most a stride.
struct TransferEntry {
  uint64_t src_addr = 0;
  uint64_t dst_addr = 0;
  uint64_t src_stride = 0;
  uint64_t dst_stride = 0;
  uint64_t bytes = 0;
  const char* part = "";  // of the plan that the blocks belong to: a literal such as "draft k"
  const std::vector<TransferRun>* runs = nullptr;  // its own in place of the plan's, contiguous
};

/// Blocks of consecutive entries that are alike, for the reader of a plan.
struct TransferPart {
  std::string name;
  std::size_t num_entries = 0;
  std::size_t num_blocks = 0;
};

/// Copies to make: n blocks, of which the i-th is lengths[i] bytes from src_addrs[i] to
/// dst_addrs[i]. A value; the addresses may belong to other processes and are never followed.
class TransferPlan {
 public:
  TransferPlan() = default;
  /// n blocks with undefined contents.
  explicit TransferPlan(std::size_t num_blocks);

  std::size_t num_blocks() const { return num_blocks_; }
  uint64_t total_bytes() const;

  std::span<const uint64_t> src_addrs() const { return {words_.get(), num_blocks_}; }
  std::span<const uint64_t> dst_addrs() const { return {words_.get() + num_blocks_, num_blocks_}; }
  std::span<const uint64_t> lengths() const {
    return {words_.get() + 2 * num_blocks_, num_blocks_};
  }
  /// The parts of all blocks in their order, or none.
  std::span<const TransferPart> parts() const { return parts_; }
  void set_parts(std::vector<TransferPart> parts) { parts_ = std::move(parts); }

  std::span<uint64_t> src_addrs() { return {words_.get(), num_blocks_}; }
  std::span<uint64_t> dst_addrs() { return {words_.get() + num_blocks_, num_blocks_}; }
  std::span<uint64_t> lengths() { return {words_.get() + 2 * num_blocks_, num_blocks_}; }

  /// Whether the same blocks are copied in the same order, ignoring parts.
  bool operator==(const TransferPlan& other) const;

 private:
  std::size_t num_blocks_ = 0;
  std::unique_ptr<uint64_t[]> words_;  // the three arrays, one after the other
  std::vector<TransferPart> parts_;
};

/// Makes the blocks of all entries, entry-major, runs in their order: a block per run where units
/// of the entry are contiguous on both sides (strides equal to bytes), else a block per unit. The
/// caller has checked ranges; addresses wrap modulo 2^64. Throws std::invalid_argument for more
/// than 2^28 blocks, which no engine would carry and which take 6 GiB.
TransferPlan make_transfer_plan(
    std::span<const TransferEntry> entries, std::span<const TransferRun> runs
);

}  // namespace cpattn
