// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer_plan.h"

#include <algorithm>
#include <numeric>

namespace cpattn {
namespace {

bool is_contiguous(const TransferEntry& entry) {
  return entry.src_stride == entry.bytes && entry.dst_stride == entry.bytes;
}

}  // namespace

TransferPlan::TransferPlan(std::size_t num_blocks)
    : num_blocks_(num_blocks), words_(std::make_unique_for_overwrite<uint64_t[]>(3 * num_blocks)) {}

uint64_t TransferPlan::total_bytes() const {
  return std::accumulate(lengths().begin(), lengths().end(), uint64_t{0});
}

bool TransferPlan::operator==(const TransferPlan& other) const {
  return num_blocks_ == other.num_blocks_ &&
         std::equal(words_.get(), words_.get() + 3 * num_blocks_, other.words_.get());
}

TransferPlan make_transfer_plan(
    std::span<const TransferEntry> entries, std::span<const TransferRun> runs
) {
  uint64_t num_units = 0;
  for (const TransferRun& run : runs) num_units += static_cast<uint64_t>(run.count);
  uint64_t num_blocks = 0;
  for (const TransferEntry& entry : entries) {
    num_blocks += is_contiguous(entry) ? runs.size() : num_units;
  }
  TransferPlan plan(num_blocks);
  uint64_t* src = plan.src_addrs().data();
  uint64_t* dst = plan.dst_addrs().data();
  uint64_t* length = plan.lengths().data();
  for (const TransferEntry& entry : entries) {
    const bool contiguous = is_contiguous(entry);
    for (const TransferRun& run : runs) {
      const uint64_t num_parts = contiguous ? 1 : static_cast<uint64_t>(run.count);
      const uint64_t bytes =
          contiguous ? entry.bytes * static_cast<uint64_t>(run.count) : entry.bytes;
      for (uint64_t i = 0; i < num_parts; ++i) {
        *src++ = entry.src_addr + (static_cast<uint64_t>(run.src) + i) * entry.src_stride;
        *dst++ = entry.dst_addr + (static_cast<uint64_t>(run.dst) + i) * entry.dst_stride;
        *length++ = bytes;
      }
    }
  }
  return plan;
}

}  // namespace cpattn
