// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/copy_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpattn/transfer/memory_ranges.h"

namespace cpattn {
namespace {

using Words = std::vector<uint64_t>;

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

TEST(copy_blocks, same_bytes_for_any_number_of_threads) {
  std::mt19937 generator(1);
  // Empty and tiny blocks, some that share a megabyte, and some of several.
  Words lengths{0, 1, 3'000'001, 63, 0, 1 << 20, (1 << 20) - 1, 5, 1'500'000, 0};
  const uint64_t total = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  std::vector<uint8_t> src(total), dst(total + 2 * lengths.size()), expected;
  for (uint8_t& byte : src) byte = static_cast<uint8_t>(generator());
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  Words src_addrs(lengths.size()), dst_addrs(lengths.size());
  uint64_t begin = 0;
  for (std::size_t i = 0; i < lengths.size(); begin += lengths[i++]) {
    src_addrs[i] = address(src.data() + begin);
  }
  expected = dst;
  uint64_t at = 1;  // a byte around each block must stay
  for (std::size_t i : order) {
    dst_addrs[i] = address(dst.data() + at);
    std::copy_n(reinterpret_cast<uint8_t*>(src_addrs[i]), lengths[i], expected.data() + at);
    at += lengths[i] + 1;
  }
  for (int num_threads : {0, 1, 2, 5}) {
    std::fill(dst.begin(), dst.end(), uint8_t{0});
    copy_blocks(src_addrs, dst_addrs, lengths, num_threads);
    EXPECT_EQ(dst, expected) << num_threads << " threads";
  }
}

TEST(copy_blocks, nothing_to_copy_and_lists_that_do_not_match) {
  copy_blocks({}, {}, {});
  const Words one{1}, none{0};
  copy_blocks(one, one, none);  // no byte of these addresses is touched
  EXPECT_THROW(copy_blocks(one, one, {}), std::invalid_argument);
  EXPECT_THROW(copy_blocks({}, one, one), std::invalid_argument);
}

TEST(copy_blocks, lengths_that_wrap_copy_nothing) {
  const uint8_t src = 1;
  uint8_t dst = 0;
  const Words from(3, address(&src)), to(3, address(&dst));
  EXPECT_THROW(copy_blocks(from, to, Words{1, UINT64_MAX, 1}), std::invalid_argument);
  EXPECT_THROW(copy_blocks(from, to, Words{1, INT64_MAX, 0}), std::invalid_argument);
  EXPECT_EQ(dst, 0);
}

TEST(memory_ranges, refused_calls_change_nothing) {
  MemoryRanges ranges;
  EXPECT_EQ(ranges.add(Words{100, 200}, Words{50, 50}), 0);
  EXPECT_EQ(ranges.add(Words{300, 149}, Words{10, 2}), MemoryRanges::kOverlap);
  EXPECT_EQ(ranges.add(Words{300, 400}, Words{10, 0}), MemoryRanges::kInvalid);
  EXPECT_EQ(ranges.remove(Words{100, 300}), MemoryRanges::kUnknown);
  EXPECT_TRUE(ranges.contain(Words{100, 249}, Words{50, 1}));
  EXPECT_FALSE(ranges.contain(Words{300}, Words{1}));
  EXPECT_THROW(ranges.add(Words{300}, Words{1, 2}), std::invalid_argument);
  EXPECT_THROW(ranges.contain(Words{100, 200}, Words{1}), std::invalid_argument);
}

TEST(memory_ranges, adjacent_ranges_do_not_join_and_the_last_address_counts) {
  MemoryRanges ranges;
  EXPECT_EQ(ranges.add(Words{100, 150, UINT64_MAX}, Words{50, 50, 1}), 0);
  EXPECT_TRUE(ranges.contain(Words{100, 150, UINT64_MAX}, Words{50, 50, 1}));
  EXPECT_FALSE(ranges.contain(Words{149}, Words{2}));
  EXPECT_FALSE(ranges.contain(Words{UINT64_MAX}, Words{2}));
  EXPECT_TRUE(ranges.contain(Words{7}, Words{0}));
  EXPECT_FALSE(ranges.contain(Words{7, 149}, Words{0, 2}));
  EXPECT_EQ(ranges.add(Words{UINT64_MAX - 1}, Words{3}), MemoryRanges::kInvalid);
}

}  // namespace
}  // namespace cpattn
