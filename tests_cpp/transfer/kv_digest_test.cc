// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ops/transfer/row_hash.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
constexpr int64_t kNumTokens = 37, kNumHeads = 4, kRow = 24;

/// Bytes of a sequence, [token][head][kRow], in a pool of some layout.
class Side {
 public:
  struct Options {
    int64_t page_size = 4;
    KVAxisOrder order = KVAxisOrder::nhd;
    IndexRange heads = {0, kNumHeads};
    KVPlacement placement = {};
    int64_t gap = 0;  // bytes between pages
  };

  Side(const std::vector<uint8_t>& rows, Ints pages, const Options& o)
      : pages_(std::move(pages)), page_size_(o.page_size) {
    const int64_t heads = o.heads.size(), item = page_size_ * heads * kRow;
    const int64_t stride = item + o.gap, num_pages = *std::ranges::max_element(pages_) + 1;
    memory_.assign(num_pages * stride, 0xee);
    const auto& p = o.placement;
    int64_t local = 0;
    for (int64_t token = 0; token < kNumTokens; ++token) {
      if (token / p.dcp_interleave % p.dcp_size != p.dcp_rank) continue;
      const int64_t page = pages_[local / page_size_], row = local % page_size_;
      ++local;
      for (int64_t head = o.heads.begin; head < o.heads.end; ++head) {
        const int64_t h = head - o.heads.begin;
        const int64_t place = o.order == KVAxisOrder::nhd ? row * heads + h : h * page_size_ + row;
        std::copy_n(
            &rows[(token * kNumHeads + head) * kRow], kRow, &memory_[page * stride + place * kRow]
        );
      }
    }
    KVPlacement placement = o.placement;
    placement.page_size = page_size_;
    placement.total_kv_heads = kNumHeads;
    const KVEntry entry = {
        .layer_id = 3,
        .addr = reinterpret_cast<uint64_t>(memory_.data()),
        .num_bytes = static_cast<uint64_t>((num_pages - 1) * stride + item),
        .item_len = static_cast<uint64_t>(item),
        .page_stride = static_cast<uint64_t>(stride),
        .kv_layout = o.order,
    };
    layout_.emplace(std::vector{entry}, placement);
  }

  KVEntryDigest digest(
      std::optional<int64_t> block = {}, const KVLayout* peer = nullptr, int threads = 1
  ) const {
    const auto all =
        digest_kv(*layout_, {.pages = pages_, .num_tokens = kNumTokens}, block, peer, threads);
    EXPECT_EQ(all.size(), 1u);
    return all[0];
  }
  std::vector<uint64_t> sums(std::optional<int64_t> block = {}) const { return digest(block).sums; }
  const KVLayout& layout() const { return *layout_; }
  std::vector<uint8_t>& memory() { return memory_; }

 private:
  Ints pages_;
  int64_t page_size_;
  std::vector<uint8_t> memory_;
  std::optional<KVLayout> layout_;
};

std::vector<uint8_t> random_rows(uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<uint8_t> rows(kNumTokens * kNumHeads * kRow);
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(generator());
  return rows;
}

Ints pages_of(int64_t page_size, uint32_t seed) {
  Ints pages((kNumTokens + page_size - 1) / page_size + 2);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(seed));
  return pages;
}

TEST(digest_kv, depends_on_no_place) {
  const auto rows = random_rows(1);
  const Side one(rows, pages_of(4, 1), {});
  for (const std::optional<int64_t> block : {std::optional<int64_t>(), std::optional<int64_t>(5)}) {
    for (int64_t page_size : {1, 3, 4, 16, 64}) {
      for (const KVAxisOrder order : {KVAxisOrder::nhd, KVAxisOrder::hnd}) {
        for (int64_t gap : {0, 40}) {
          const Side other(
              rows, pages_of(page_size, 2), {.page_size = page_size, .order = order, .gap = gap}
          );
          EXPECT_EQ(one.sums(block), other.sums(block)) << page_size << " gap " << gap;
        }
      }
    }
  }
}

TEST(digest_kv, parts_add_up) {
  const auto rows = random_rows(2);
  const auto whole = Side(rows, pages_of(4, 1), {}).digest(8);
  std::vector<uint64_t> sums(whole.sums.size());
  int64_t num_rows = 0;
  for (int64_t tp = 0; tp < 2; ++tp) {
    for (int64_t dcp = 0; dcp < 3; ++dcp) {
      const KVPlacement placement = {
          .tp_rank = tp, .tp_size = 2, .dcp_rank = dcp, .dcp_size = 3, .dcp_interleave = 2
      };
      const Side part(
          rows, pages_of(2, 3),
          {.page_size = 2, .heads = {2 * tp, 2 * tp + 2}, .placement = placement}
      );
      const auto digest = part.digest(8);
      num_rows += digest.num_rows;
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += digest.sums[i];
      // The whole side, asked for what this peer holds.
      const Side all(rows, pages_of(16, 4), {.page_size = 16});
      EXPECT_EQ(all.digest(8, &part.layout()).sums, digest.sums) << tp << " " << dcp;
      EXPECT_EQ(all.digest(8, &part.layout()).num_rows, digest.num_rows);
    }
  }
  EXPECT_EQ(sums, whole.sums);
  EXPECT_EQ(num_rows, whole.num_rows);
  EXPECT_EQ(num_rows, kNumTokens * kNumHeads);
}

TEST(digest_kv, sees_every_byte_and_every_swap) {
  const auto rows = random_rows(3);
  const auto sums = Side(rows, pages_of(4, 1), {}).sums();
  for (std::size_t i = 0; i < rows.size(); i += 7) {
    auto other = rows;
    other[i] ^= uint8_t{1} << (i % 8);
    EXPECT_NE(Side(other, pages_of(4, 1), {}).sums(), sums) << i;
  }
  for (int64_t row = 1; row < kNumTokens * kNumHeads; ++row) {  // of another token or head
    auto other = rows;
    std::swap_ranges(other.begin(), other.begin() + kRow, other.begin() + row * kRow);
    EXPECT_NE(Side(other, pages_of(4, 1), {}).sums(), sums) << row;
  }
}

TEST(digest_kv, names_the_block_of_a_change) {
  auto rows = random_rows(4);
  const auto before = Side(rows, pages_of(4, 1), {}).sums(10);
  ASSERT_EQ(before.size(), 4u);
  rows[(23 * kNumHeads + 1) * kRow + 5] ^= 1;
  const auto after = Side(rows, pages_of(4, 1), {}).sums(10);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(before[i] == after[i], i != 2);
}

TEST(digest_kv, the_number_of_threads_changes_nothing) {
  // Several megabytes, so that threads have items of their own.
  std::vector<uint8_t> memory(6 << 20);
  std::mt19937 generator(5);
  for (uint8_t& byte : memory) byte = static_cast<uint8_t>(generator());
  const KVEntry entry = {
      .addr = reinterpret_cast<uint64_t>(memory.data()),
      .num_bytes = memory.size(),
      .item_len = 1 << 15
  };
  const KVLayout layout({entry}, {.page_size = 16, .total_kv_heads = 8});
  Ints pages(memory.size() >> 15);
  std::iota(pages.rbegin(), pages.rend(), 0);
  const auto one = digest_kv(layout, {.pages = pages}, 100, nullptr, 1)[0].sums;
  for (int threads : {0, 2, 5}) {
    EXPECT_EQ(digest_kv(layout, {.pages = pages}, 100, nullptr, threads)[0].sums, one);
  }
}

TEST(row_hash, keeps_its_values) {
  std::array<unsigned char, 200> bytes;
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(0));
  const uint64_t key = head_key(entry_key(3, 1, false), 2);
  std::vector<uint64_t> hashes;
  for (std::size_t n : {0, 4, 16, 17, 63, 64, 200}) {
    hashes.push_back(row_hash(bytes.data(), n, key, 9));
  }
  const std::vector<uint64_t> expected = {0xd95b893caa65b15a, 0xca5294b3b1d0a6a0,
                                          0x6c5f3b76ec719acd, 0x3c7f780fedb491d7,
                                          0x37c9a57f8a773105, 0x8e5f88ba3ee583fc,
                                          0x4af9013cbcac36c7};
  EXPECT_EQ(hashes, expected);
}

TEST(digest_kv, pages_that_are_no_rows_are_whole) {
  std::vector<uint8_t> memory(5 * 30);
  std::iota(memory.begin(), memory.end(), uint8_t{0});
  const KVEntry entry = {
      .kind = KVKind::index_k,
      .addr = reinterpret_cast<uint64_t>(memory.data()),
      .num_bytes = memory.size(),
      .item_len = 30,
      .token_rows = false
  };
  const KVLayout layout({entry}, {.page_size = 4});
  const Ints pages = {3, 1};
  const auto whole = digest_kv(layout, {.pages = pages});
  EXPECT_EQ(whole[0].num_rows, 2);
  EXPECT_EQ(whole[0].row_bytes, 30);
  // Tokens of a last page that is not full have the bytes of all of it.
  EXPECT_EQ(digest_kv(layout, {.pages = pages, .num_tokens = 6})[0].sums, whole[0].sums);
  EXPECT_THROW(digest_kv(layout, {.pages = pages, .first_token = 1}), std::invalid_argument);
}

TEST(digest_kv, refuses_what_is_not_there) {
  std::vector<uint8_t> memory(64);
  const auto addr = reinterpret_cast<uint64_t>(memory.data());
  const KVEntry k = {.addr = addr, .num_bytes = 64, .item_len = 16};
  KVEntry v = {.kind = KVKind::v, .addr = addr + 8, .num_bytes = 32, .item_len = 16};
  const KVLayout layout({k}, {.page_size = 4}), overlapping({k, v}, {.page_size = 4});
  const auto message = [](const KVLayout& side, const KVTokenRange& range) -> std::string {
    try {
      digest_kv(side, range);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  const Ints good = {0, 3}, outside = {0, 4}, negative = {-1}, twice = {2, 2};
  EXPECT_EQ(message(layout, {.pages = good}), "");
  EXPECT_EQ(
      message(layout, {.pages = outside}),
      "digest: given pages must be in [0, 4) for k of layer 0, got 4 at index 1"
  );
  EXPECT_NE(message(layout, {.pages = negative}).find("got -1 at index 0"), std::string::npos);
  EXPECT_NE(
      message(layout, {.pages = twice}).find("must be distinct, got page 2"), std::string::npos
  );
  EXPECT_NE(
      message(layout, {.pages = good, .num_tokens = 9}).find("must hold tokens [0, 9)"),
      std::string::npos
  );
  EXPECT_NE(
      message(layout, {.pages = good, .start = 2}).find("first token of a page"), std::string::npos
  );
  EXPECT_NE(
      message(overlapping, {.pages = good}).find("must not overlap, got k of"), std::string::npos
  );
  EXPECT_THROW(digest_kv(layout, {.pages = good}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace cpattn
