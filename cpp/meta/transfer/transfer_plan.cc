// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/transfer_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr std::size_t kMaxBlocks = std::size_t{1} << 28;

bool is_contiguous(const TransferEntry& entry) {
  return entry.src_stride == entry.bytes && entry.dst_stride == entry.bytes;
}

bool same_units(const TransferEntry& a, const TransferEntry& b) {
  return a.src_stride == b.src_stride && a.dst_stride == b.dst_stride && a.bytes == b.bytes &&
         a.runs == b.runs;
}

struct Blocks {
  uint64_t* src;
  uint64_t* dst;
  uint64_t* length;
};

void fill(const Blocks& out, const TransferEntry& entry, std::span<const TransferRun> runs) {
  const bool contiguous = is_contiguous(entry);
  std::size_t block = 0;
  for (const TransferRun& run : runs) {
    const auto count = static_cast<uint64_t>(run.count);
    const uint64_t num_parts = contiguous ? 1 : count;
    for (uint64_t i = 0; i < num_parts; ++i, ++block) {
      out.src[block] = entry.src_addr + (static_cast<uint64_t>(run.src) + i) * entry.src_stride;
      out.dst[block] = entry.dst_addr + (static_cast<uint64_t>(run.dst) + i) * entry.dst_stride;
      out.length[block] = contiguous ? count * entry.bytes : entry.bytes;
    }
  }
}

/// Writes the blocks of an entry by shifting the preceding blocks, which have the same units.
void shift(const Blocks& out, std::size_t num_blocks, uint64_t src, uint64_t dst) {
  for (std::size_t i = 0; i < num_blocks; ++i) out.src[i] = (out.src - num_blocks)[i] + src;
  for (std::size_t i = 0; i < num_blocks; ++i) out.dst[i] = (out.dst - num_blocks)[i] + dst;
  std::copy_n(out.length - num_blocks, num_blocks, out.length);
}

/// Counts the blocks of an entry in a plan with num_runs runs of num_units units.
std::size_t count_blocks(const TransferEntry& entry, std::size_t num_runs, std::size_t num_units) {
  if (entry.runs) return entry.runs->size();
  return is_contiguous(entry) ? num_runs : num_units;
}

std::vector<TransferPart> make_parts(
    std::span<const TransferEntry> entries, std::size_t num_runs, std::size_t num_units
) {
  std::vector<TransferPart> parts;
  for (const TransferEntry& entry : entries) {
    if (parts.empty() || parts.back().name != entry.part) parts.push_back({.name = entry.part});
    ++parts.back().num_entries;
    parts.back().num_blocks += count_blocks(entry, num_runs, num_units);
  }
  return parts;
}

/// The units of all runs, at most one more than a plan may have: large counts would wrap.
std::size_t count_units(std::span<const TransferRun> runs) {
  std::size_t num_units = 0;
  for (const TransferRun& run : runs) {
    num_units += std::min(static_cast<std::size_t>(run.count), kMaxBlocks + 1);
    num_units = std::min(num_units, kMaxBlocks + 1);
  }
  return num_units;
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
  const std::size_t num_units = count_units(runs);
  std::vector<TransferPart> parts = make_parts(entries, runs.size(), num_units);
  std::size_t num_blocks = 0;
  for (const TransferPart& part : parts) num_blocks += part.num_blocks;
  check(
      num_blocks <= kMaxBlocks, "TransferPlan: a plan must have at most ", kMaxBlocks,
      " blocks, got ", num_blocks, " for ", entries.size(),
      " buffers: their units are sent one by one"
  );
  TransferPlan plan(num_blocks);
  Blocks out = {plan.src_addrs().data(), plan.dst_addrs().data(), plan.lengths().data()};
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const TransferEntry& entry = entries[i];
    const std::size_t count = count_blocks(entry, runs.size(), num_units);
    if (i > 0 && same_units(entry, entries[i - 1])) {
      const TransferEntry& last = entries[i - 1];
      shift(out, count, entry.src_addr - last.src_addr, entry.dst_addr - last.dst_addr);
    } else {
      fill(out, entry, entry.runs ? std::span(*entry.runs) : runs);
    }
    out = {out.src + count, out.dst + count, out.length + count};
  }
  plan.set_parts(std::move(parts));
  return plan;
}

}  // namespace cpattn
