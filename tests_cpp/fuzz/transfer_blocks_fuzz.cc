// SPDX-License-Identifier: Apache-2.0
// Pages and runs of page lists, blocks of runs, copies of blocks, and registered ranges, each
// against the plainest program for it.
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "cpattn/base/prefix_sums.h"
#include "cpattn/transfer/copy_blocks.h"
#include "cpattn/transfer/kv_pages.h"
#include "cpattn/transfer/memory_ranges.h"
#include "cpattn/transfer/transfer_plan.h"
#include "fuzz/fuzz.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Words = std::vector<uint64_t>;

int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

void check_pages(Reader& in) {
  const int64_t page_size = in.mostly(in.between(1, 5), 8);
  const int64_t num_tokens = in.mostly(in.between(0, 40), 8);
  if (const auto n = accepted([&] { return kv_to_page_num(num_tokens, page_size); })) {
    FUZZ_CHECK(*n >= num_tokens / page_size && *n - num_tokens / page_size <= 1);
    FUZZ_CHECK((*n == num_tokens / page_size) == (num_tokens % page_size == 0));
  }
  const Ints slots = in.list(in.between(0, 24), [&] { return in.mostly(in.between(0, 200)); });
  const auto pages = accepted([&] { return kv_to_page_indices(slots, page_size); });
  if (!pages) return;
  FUZZ_CHECK(std::ssize(*pages) == kv_to_page_num(std::ssize(slots), page_size));
  for (std::size_t i = 0; i < pages->size(); ++i) {
    FUZZ_CHECK((*pages)[i] == slots[i * static_cast<std::size_t>(page_size)] / page_size);
  }
}

Ints read_indices(Reader& in, int64_t size) {
  Ints indices;
  for (int64_t i = 0; i < size; ++i) {
    const bool follows = i > 0 && !in.rarely(3);
    indices.push_back(follows ? wrapping_add(indices.back(), 1) : in.mostly(in.between(0, 50), 8));
  }
  return indices;
}

void check_runs(Reader& in) {
  const int64_t size = in.between(0, 24);
  const Ints src = read_indices(in, size), dst = read_indices(in, in.size_near(size));
  const auto runs = accepted([&] { return group_runs(src, dst); });
  FUZZ_CHECK(runs.has_value() == (src.size() == dst.size() || src.empty() || dst.empty()));
  if (!runs || src.empty() || dst.empty()) return;
  std::size_t i = 0;
  const TransferRun* last = nullptr;
  for (const TransferRun& run : *runs) {
    FUZZ_CHECK(run.count >= 1);
    if (last) {  // the fewest: it does not continue the one before
      FUZZ_CHECK(
          wrapping_add(last->src, last->count) != run.src ||
          wrapping_add(last->dst, last->count) != run.dst
      );
    }
    for (int64_t k = 0; k < run.count; ++k, ++i) {
      FUZZ_CHECK(src.at(i) == wrapping_add(run.src, k) && dst.at(i) == wrapping_add(run.dst, k));
    }
    last = &run;
  }
  FUZZ_CHECK(i == src.size());
}

void check_plan(Reader& in) {
  std::vector<TransferRun> runs(in.between(0, 6));
  for (TransferRun& run : runs) {
    run = {in.mostly(in.between(0, 20)), in.mostly(in.between(0, 20)), in.between(1, 5)};
  }
  std::vector<TransferEntry> entries(in.between(0, 5));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i > 0 && in.flag()) entries[i] = entries[i - 1];
    TransferEntry& entry = entries[i];
    entry.src_addr = static_cast<uint64_t>(in.mostly(in.between(0, 1000)));
    entry.dst_addr = static_cast<uint64_t>(in.mostly(in.between(0, 1000)));
    if (in.flag()) {
      entry.bytes = in.between(1, 8);
      entry.src_stride = entry.bytes + (in.flag() ? in.between(0, 3) : 0);
      entry.dst_stride = entry.bytes + (in.flag() ? in.between(0, 3) : 0);
    }
    entry.part = in.flag() ? "k" : "v";
  }
  // Units of millions of pages are refused before anything is made of them.
  const bool is_huge = in.rarely() && !runs.empty() && !entries.empty();
  if (is_huge) {
    runs[0].count = in.between((int64_t{1} << 28) + 1, INT64_MAX);
    entries[0].bytes = 1;
    entries[0].src_stride = 2;
  }
  const auto plan = accepted([&] { return make_transfer_plan(entries, runs); });
  FUZZ_CHECK(plan.has_value() != is_huge);
  if (!plan) return;
  std::size_t block = 0;
  for (const TransferEntry& entry : entries) {
    for (const TransferRun& run : runs) {
      const bool joined = entry.src_stride == entry.bytes && entry.dst_stride == entry.bytes;
      for (int64_t i = 0; i < (joined ? 1 : run.count); ++i, ++block) {
        FUZZ_CHECK(block < plan->num_blocks());
        const auto src = static_cast<uint64_t>(run.src) + i;
        const auto dst = static_cast<uint64_t>(run.dst) + i;
        FUZZ_CHECK(plan->src_addrs()[block] == entry.src_addr + src * entry.src_stride);
        FUZZ_CHECK(plan->dst_addrs()[block] == entry.dst_addr + dst * entry.dst_stride);
        FUZZ_CHECK(plan->lengths()[block] == entry.bytes * (joined ? run.count : 1));
      }
    }
  }
  FUZZ_CHECK(block == plan->num_blocks());
}

void check_copies(Reader& in) {
  const std::size_t size = in.between(0, 64);
  std::vector<uint8_t> from(size), to(size, 0), expected(size, 0);
  std::iota(from.begin(), from.end(), uint8_t{1});
  Words src, dst, lengths;
  for (std::size_t at = 0; at < size;) {
    const std::size_t length = std::min<std::size_t>(in.between(0, 9), size - at);
    const std::size_t begin = in.between(0, static_cast<int64_t>(size - length));
    src.push_back(reinterpret_cast<uint64_t>(from.data()) + begin);
    dst.push_back(reinterpret_cast<uint64_t>(to.data()) + at);
    lengths.push_back(length);
    std::copy_n(from.begin() + begin, length, expected.begin() + at);
    at += length + in.between(length == 0 ? 1 : 0, 2);
  }
  if (in.rarely()) src.resize(in.size_near(std::ssize(src)));
  const bool fits = src.size() == lengths.size();
  const bool copied = accepted([&] {
                        copy_blocks(src, dst, lengths, 1);
                        return true;
                      }).has_value();
  FUZZ_CHECK(copied == fits);
  FUZZ_CHECK(to == (copied ? expected : std::vector<uint8_t>(size, 0)));
  // Lengths whose sum no memory has.
  Words none(3, 0), huge(3, UINT64_MAX / 2);
  FUZZ_CHECK(!accepted([&] {
    copy_blocks(none, none, huge, 1);
    return true;
  }));
}

/// Registered ranges as first and last byte.
class PlainRanges {
 public:
  int add(const Words& addrs, const Words& sizes) {
    auto ranges = ranges_;
    for (std::size_t i = 0; i < addrs.size(); ++i) {
      const uint64_t first = addrs[i], last = first + (sizes[i] - 1);
      if (sizes[i] == 0 || last < first) return MemoryRanges::kInvalid;
      for (const auto& [a, b] : ranges) {
        if (first <= b && a <= last) return MemoryRanges::kOverlap;
      }
      ranges[first] = last;
    }
    ranges_ = std::move(ranges);
    return 0;
  }
  int remove(const Words& addrs) {
    auto ranges = ranges_;
    for (const uint64_t addr : addrs) {
      if (ranges.erase(addr) == 0) return MemoryRanges::kUnknown;
    }
    ranges_ = std::move(ranges);
    return 0;
  }
  bool contain(const Words& addrs, const Words& sizes) const {
    for (std::size_t i = 0; i < addrs.size(); ++i) {
      const uint64_t last = addrs[i] + (sizes[i] - 1);
      if (sizes[i] == 0) continue;
      const bool found = std::ranges::any_of(ranges_, [&](const auto& range) {
        return range.first <= addrs[i] && last >= addrs[i] && last <= range.second;
      });
      if (!found) return false;
    }
    return true;
  }

 private:
  std::map<uint64_t, uint64_t> ranges_;
};

void check_ranges(Reader& in) {
  MemoryRanges ranges;
  PlainRanges plain;
  const uint64_t base = in.rarely(4) ? UINT64_MAX - 30 : in.rarely(8) ? 0 : 4096;
  for (int64_t step = in.between(1, 8); step > 0; --step) {
    Words addrs, sizes;
    for (int64_t i = in.between(0, 3); i > 0; --i) {
      addrs.push_back(base + in.between(0, 40));
      sizes.push_back(static_cast<uint64_t>(in.mostly(in.between(0, 12))));
    }
    switch (in.between(0, 2)) {
      case 0:
        FUZZ_CHECK(ranges.add(addrs, sizes) == plain.add(addrs, sizes));
        break;
      case 1:
        FUZZ_CHECK(ranges.remove(addrs) == plain.remove(addrs));
        break;
      default:
        FUZZ_CHECK(ranges.contain(addrs, sizes) == plain.contain(addrs, sizes));
    }
  }
}

void check_sums(Reader& in) {
  Ints sums = {in.mostly(0, 8)};
  for (int64_t i = in.between(0, 8); i > 0; --i) {
    sums.push_back(in.mostly(wrapping_add(sums.back(), in.between(0, 4))));
  }
  if (in.rarely()) sums.clear();
  const PrefixSumRule rule = {
      .leading_zero = in.flag(),
      .reaches_total = in.flag(),
      .total = in.mostly(sums.empty() ? 0 : sums.back(), 4),
      .total_name = "the total"
  };
  const bool passed = accepted([&] {
                        check_prefix_sums("fuzz", "sums", sums, rule);
                        return true;
                      }).has_value();
  if (!passed) return;
  FUZZ_CHECK(std::ranges::is_sorted(sums));
  FUZZ_CHECK(std::ranges::all_of(sums, [&](auto s) { return s >= 0 && s <= rule.total; }));
  if (rule.leading_zero) FUZZ_CHECK(sums.at(0) == 0);
  if (rule.reaches_total) FUZZ_CHECK((sums.empty() ? 0 : sums.back()) == rule.total);
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {check_pages,  check_runs,   check_plan,
                                          check_copies, check_ranges, check_sums};
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
