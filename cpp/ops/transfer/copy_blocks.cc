// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/copy_blocks.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

constexpr uint64_t kItemBytes = uint64_t{1} << 20;  // some 100 us of copying

/// Calls work(i, src, dst, bytes) for parts of all blocks, in no order.
template <class Work>
void for_parts(
    const char* function,
    std::span<const uint64_t> src_addrs,
    std::span<const uint64_t> dst_addrs,
    std::span<const uint64_t> lengths,
    int num_threads,
    const Work& work
) {
  const std::size_t num_blocks = lengths.size();
  check(
      src_addrs.size() == num_blocks && dst_addrs.size() == num_blocks, function,
      ": src_addrs, dst_addrs and lengths must have equal lengths, got ", src_addrs.size(), ", ",
      dst_addrs.size(), " and ", num_blocks
  );
  // Blocks may be large or small, so threads share the bytes of all, laid end to end.
  std::vector<uint64_t> begins(num_blocks + 1, 0);
  for (std::size_t i = 0; i < num_blocks; ++i) {
    begins[i + 1] = begins[i] + lengths[i];
    check(
        begins[i + 1] >= begins[i] && begins[i + 1] <= INT64_MAX, function,
        ": lengths must add up to less than 2^63, got ", lengths[i], " at index ", i
    );
  }
  const uint64_t num_items = (begins.back() + kItemBytes - 1) / kItemBytes;
  parallel_for(
      static_cast<int64_t>(num_items), num_threads > 0 ? num_threads : default_num_threads(),
      [&](int64_t item, StopToken&) {
        uint64_t at = static_cast<uint64_t>(item) * kItemBytes;
        const uint64_t end = std::min(at + kItemBytes, begins.back());
        std::size_t i = std::upper_bound(begins.begin(), begins.end(), at) - begins.begin() - 1;
        for (; at < end; ++i) {
          const uint64_t skip = at - begins[i];
          const uint64_t bytes = std::min(begins[i + 1], end) - at;
          work(
              i, reinterpret_cast<const void*>(src_addrs[i] + skip),
              reinterpret_cast<void*>(dst_addrs[i] + skip), bytes
          );
          at += bytes;
        }
      }
  );
}

}  // namespace

void copy_blocks(
    std::span<const uint64_t> src_addrs,
    std::span<const uint64_t> dst_addrs,
    std::span<const uint64_t> lengths,
    int num_threads
) {
  for_parts(
      "copy_blocks", src_addrs, dst_addrs, lengths, num_threads,
      [](std::size_t, const void* src, void* dst, uint64_t bytes) { std::memmove(dst, src, bytes); }
  );
}

std::vector<int64_t> differing_blocks(
    std::span<const uint64_t> src_addrs,
    std::span<const uint64_t> dst_addrs,
    std::span<const uint64_t> lengths,
    int num_threads
) {
  const auto differs = std::make_unique<std::atomic<bool>[]>(lengths.size());
  for_parts(
      "differing_blocks", src_addrs, dst_addrs, lengths, num_threads,
      [&](std::size_t i, const void* src, const void* dst, uint64_t bytes) {
        if (std::memcmp(src, dst, bytes) != 0) differs[i].store(true, std::memory_order_relaxed);
      }
  );
  std::vector<int64_t> blocks;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (differs[i]) blocks.push_back(static_cast<int64_t>(i));
  }
  return blocks;
}

}  // namespace cpattn
