// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/sequence_calls.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using testing::message_of;

constexpr int64_t kPage = 8;

/// The share of a rank of one request, whose pages are in their order.
KeyShare share_of(int64_t len, Interleave interleave, int64_t rank) {
  BatchPages pages{.page_size = kPage, .kv_lens = {len}};
  pages.ids.resize((len + kPage - 1) / kPage);
  std::iota(pages.ids.begin(), pages.ids.end(), 0);
  pages.indptr = {0, std::ssize(pages.ids)};
  const auto shared = std::make_shared<BatchPages>(std::move(pages));
  return {std::make_shared<BatchKeys>(shared, interleave), {rank}};
}

std::vector<SequenceCall> calls_of(
    const KeyShare& share, const Ints& positions, const RowVisibility& visibility = {}
) {
  const Ints request(positions.size());
  return sequence_calls(share, share.local_pages(), {request, positions}, visibility);
}

Ints positions_below(int64_t len) {
  Ints positions(len);
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

/// The keys of sequence i of a call, and whether its row j sees key k of them.
int64_t keys_of(const SequenceCall& call, std::size_t i, int64_t page_size) {
  return (call.kv_indptr[i + 1] - call.kv_indptr[i] - 1) * page_size + call.last_page_len[i];
}

TEST(SequenceCalls, TokensThatAreDealtOutMakeFewSequences) {
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto calls = calls_of(share_of(64, {4, 1}, rank), positions_below(64));
    ASSERT_EQ(calls.size(), 1);
    EXPECT_TRUE(calls[0].causal);
    EXPECT_EQ(calls[0].q_lens.size(), 4);
  }
}

TEST(SequenceCalls, RowsOfOtherRanksPagesGoTogether) {
  const auto calls = calls_of(share_of(64, {4, 8}, 1), positions_below(64));
  ASSERT_EQ(calls.size(), 2);
  EXPECT_TRUE(calls[0].causal);
  EXPECT_EQ(calls[0].q_lens, (Ints{16}));  // tokens 8 to 15 and 40 to 47
  EXPECT_FALSE(calls[1].causal);
  EXPECT_EQ(calls[1].q_lens, (Ints{24, 16}));
}

TEST(SequenceCalls, TheOrderOfRowsDoesNotMatter) {
  const KeyShare share = share_of(64, {3, 2}, 1);
  const Ints ascending = positions_below(64);
  const auto expected = calls_of(share, ascending);
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    Ints positions = ascending;
    if (round < 10) {  // in stretches, as those of ranks
      std::rotate(positions.begin(), positions.begin() + round * 6, positions.end());
    } else {
      std::shuffle(positions.begin(), positions.end(), random);
    }
    const auto calls = calls_of(share, positions);
    ASSERT_EQ(calls.size(), expected.size());
    for (std::size_t c = 0; c < calls.size(); ++c) {
      EXPECT_EQ(calls[c].kv_indices, expected[c].kv_indices);
      Ints rows;
      for (const int64_t row : calls[c].rows) rows.push_back(positions[row]);
      EXPECT_EQ(rows, expected[c].rows);
    }
  }
}

TEST(SequenceCalls, RowsWithoutCausalityOrBehindTheEndSeeAllKeys) {
  const KeyShare share = share_of(20, {2, 8}, 0);
  const auto all = calls_of(share, {3, 0}, {.causal = false});
  ASSERT_EQ(all.size(), 1);
  EXPECT_EQ(all[0].rows, (Ints{1, 0}));
  EXPECT_EQ(keys_of(all[0], 0, kPage), 12);
  const auto padding = calls_of(share, {19, 40});
  ASSERT_EQ(padding.size(), 1);
  EXPECT_EQ(padding[0].q_lens, (Ints{2}));
  EXPECT_TRUE(calls_of(share_of(20, {2, 8}, 1), {0, 7}).empty());  // before its first key
}

/// Holds the calls of 6,000 rows that see a window against the positions of their keys.
void expect_blocks_of(const RowVisibility& visibility) {
  const int64_t len = 6000, left = 100, right = visibility.causal ? 0 : 70;
  const KeyShare share = share_of(len, {2, 8}, 1);
  const Ints positions = positions_below(len);
  const auto calls = calls_of(share, positions, visibility);
  ASSERT_EQ(calls.size(), 1);
  const SequenceCall& call = calls[0];
  EXPECT_FALSE(call.causal);
  const LocalKeys local = share.local_keys();
  const LocalPages pages = share.local_pages();
  std::size_t row = 0, byte = 0;
  for (std::size_t i = 0; i < call.q_lens.size(); ++i) {
    EXPECT_LE(call.q_lens[i], 64);
    const int64_t keys = keys_of(call, i, pages.page_size);
    const int64_t first_row = call.kv_indices[call.kv_indptr[i]] * pages.page_size;
    const int64_t first =
        std::find(local.row.begin(), local.row.end(), first_row) - local.row.begin();
    EXPECT_EQ(first % 1024, 0);
    EXPECT_EQ(call.first_key[i], first);
    EXPECT_EQ(call.requests[i], 0);
    for (int64_t j = 0; j < call.q_lens[i]; ++j, ++row) {
      const int64_t at = positions[call.rows[row]];
      for (int64_t k = 0; k < keys; ++k) {
        const int64_t bit = j * keys + k, key = local.position[first + k];
        const bool shown = ((*call.mask)[byte + bit / 8] >> bit % 8 & 1) != 0;
        ASSERT_EQ(shown, key <= at + right && key >= at - left) << at << ' ' << key;
      }
    }
    byte += (call.q_lens[i] * keys + 7) / 8;
  }
  EXPECT_EQ(byte, call.mask->size());
  EXPECT_GE(row, positions.size() - 8);  // all but those before the first key of the rank
}

TEST(SequenceCalls, WindowsGoInBlocksOfRowsAndOfAThousandKeys) {
  expect_blocks_of({.window = KeyWindow{.left = 100, .right = std::nullopt}});
  expect_blocks_of({.causal = false, .window = KeyWindow{.left = 100, .right = 70}});
}

TEST(SequenceCalls, AMaskShowsItsKeysAlone) {
  const KeyShare share = share_of(16, {2, 1}, 1);
  const std::vector<uint8_t> bits{0xFF, 0x7F, 0x00, 0x08};  // of tokens 14 and 15
  const Ints zero{0}, row_bits{16}, first_position{14};
  const RowMask mask{bits, zero, row_bits, first_position};
  const auto calls = calls_of(share, {14, 15}, {.mask = mask});
  ASSERT_EQ(calls.size(), 1);
  EXPECT_EQ(calls[0].q_lens, (Ints{2}));
  EXPECT_EQ(*calls[0].mask, (std::vector<uint8_t>{0x7F, 0x20}));  // of positions 1, 3, ..., 15
  EXPECT_EQ(
      message_of([&] { calls_of(share, {13}, {.mask = mask}); }),
      "sequence_calls: mask must have a row for position 13 of request 0"
  );
  EXPECT_EQ(
      message_of([&] { calls_of(share, {16}, {.mask = mask}); }),
      "sequence_calls: mask must have a row for position 16 of request 0"
  );
  const Ints more_bits{17}, last{16};  // one bit more than two bytes have
  const RowMask cut{std::span(bits).first(2), zero, more_bits, last};
  EXPECT_EQ(
      message_of([&] { calls_of(share_of(17, {2, 1}, 1), {16}, {.mask = cut}); }),
      "sequence_calls: mask must have a row for position 16 of request 0"
  );
}

TEST(SequenceCalls, Refusals) {
  const KeyShare share = share_of(16, {2, 1}, 0);
  const LocalPages pages = share.local_pages();
  const auto refusal = [&](const Ints& request, const Ints& position, const LocalPages& where) {
    return message_of([&] { sequence_calls(share, where, {request, position}, {}); });
  };
  EXPECT_EQ(
      refusal({0}, {}, pages),
      "sequence_calls: request and position must have the same size, got 1 and 0"
  );
  EXPECT_EQ(
      refusal({1}, {0}, pages), "sequence_calls: request must be in [0, 1), got 1 at index 0"
  );
  EXPECT_EQ(refusal({0}, {-1}, pages), "sequence_calls: position must be >= 0, got -1 at index 0");
  EXPECT_EQ(
      refusal({0}, {15}, {.page_size = 4, .indptr = {0, 1}, .ids = {0}}),
      "sequence_calls: pages must have the 8 keys of request 0"
  );
  EXPECT_EQ(
      refusal({0}, {15}, {.page_size = 4, .indptr = {0}}),
      "sequence_calls: pages must be of 1 requests, got 0"
  );
  EXPECT_EQ(
      message_of([&] { calls_of(share, {1}, {.window = KeyWindow{.left = 3, .right = -1}}); }),
      "sequence_calls: window must be >= 0 (0: a token sees itself), got -1"
  );
}

}  // namespace
}  // namespace cpattn
