// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/sequence_call.h"

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

std::optional<SequenceCall> call_of(
    const KeyShare& share, const Ints& positions, const RowVisibility& visibility = {}
) {
  const Ints request(positions.size());
  return sequence_call(share, share.local_pages(), {request, positions}, visibility);
}

Ints positions_below(int64_t len) {
  Ints positions(len);
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

int64_t keys_of(const SequenceCall& call, std::size_t i, int64_t page_size) {
  return (call.kv_indptr[i + 1] - call.kv_indptr[i] - 1) * page_size + call.last_page_len[i];
}

TEST(SequenceCallTest, ARequestIsASequenceHoweverItsKeysAreSharedOut) {
  for (const Interleave interleave : {Interleave{4, 1}, Interleave{4, 8}}) {
    const auto call = call_of(share_of(64, interleave, 1), positions_below(64));
    const int64_t first = interleave.run_len;  // of the rank's tokens
    EXPECT_EQ(call->q_lens, (Ints{64 - first}));
    EXPECT_EQ(call->first_key, (Ints{0}));
    EXPECT_EQ(keys_of(*call, 0, kPage), 16);
    for (std::size_t i = 0; i < call->rows.size(); ++i) {
      const int64_t position = first + static_cast<int64_t>(i), size = interleave.run_len;
      int64_t seen = 0;
      for (int64_t key = 0; key <= position; ++key) seen += key / size % 4 == 1;
      EXPECT_EQ((*call->key_ranges)[2 * i], 0);
      EXPECT_EQ((*call->key_ranges)[2 * i + 1], seen) << position;
    }
  }
}

TEST(SequenceCallTest, TheOrderOfRowsDoesNotMatter) {
  const KeyShare share = share_of(64, {3, 2}, 1);
  const Ints ascending = positions_below(64);
  const SequenceCall expected = *call_of(share, ascending);
  std::mt19937_64 random(3);
  for (int round = 0; round < 20; ++round) {
    Ints positions = ascending;
    if (round < 10) {  // in stretches, as those of ranks
      std::rotate(positions.begin(), positions.begin() + round * 6, positions.end());
    } else {
      std::shuffle(positions.begin(), positions.end(), random);
    }
    const SequenceCall call = *call_of(share, positions);
    EXPECT_EQ(call.kv_indices, expected.kv_indices);
    EXPECT_EQ(call.key_ranges, expected.key_ranges);
    Ints rows;
    for (const int64_t row : call.rows) rows.push_back(positions[row]);
    EXPECT_EQ(rows, expected.rows);
  }
}

TEST(SequenceCallTest, RowsWithoutCausalityOrBehindTheEndSeeAllKeys) {
  const KeyShare share = share_of(20, {2, 8}, 0);
  const auto all = call_of(share, {3, 0}, {.causal = false});
  EXPECT_EQ(all->rows, (Ints{1, 0}));
  EXPECT_EQ(all->key_ranges, (Ints{0, 12, 0, 12}));
  const auto padding = call_of(share, {19, 40});
  EXPECT_EQ(padding->q_lens, (Ints{2}));
  EXPECT_FALSE(call_of(share_of(20, {2, 8}, 1), {0, 7}));  // before its first key
}

/// Holds the ranges of 6,000 rows that see a window against the positions of their keys.
void expect_ranges_of(const RowVisibility& visibility) {
  const int64_t left = 100, right = visibility.causal ? 0 : 70;
  const KeyShare share = share_of(6000, {2, 8}, 1);
  const SequenceCall call = *call_of(share, positions_below(6000), visibility);
  const Ints keys = share.local_keys().position;
  EXPECT_EQ(call.q_lens, (Ints{visibility.causal ? 5992 : 6000}));
  for (std::size_t i = 0; i < call.rows.size(); ++i) {
    const int64_t at = call.rows[i];
    const auto begin = std::lower_bound(keys.begin(), keys.end(), at - left) - keys.begin();
    const auto end = std::upper_bound(keys.begin(), keys.end(), at + right) - keys.begin();
    ASSERT_EQ((*call.key_ranges)[2 * i], begin) << at;
    ASSERT_EQ((*call.key_ranges)[2 * i + 1], end) << at;
  }
}

TEST(SequenceCallTest, AWindowIsARangeOfKeys) {
  expect_ranges_of({.window = KeyWindow{.left = 100, .right = std::nullopt}});
  expect_ranges_of({.causal = false, .window = KeyWindow{.left = 100, .right = 70}});
}

TEST(SequenceCallTest, AMaskShowsItsKeysAlone) {
  const KeyShare share = share_of(16, {2, 1}, 1);
  const std::vector<uint8_t> bits{0xFF, 0x7F, 0x00, 0x08};  // of tokens 14 and 15
  const Ints zero{0}, row_bits{16}, first_position{14};
  const RowMask mask{bits, zero, row_bits, first_position};
  const auto call = call_of(share, {14, 15}, {.mask = mask});
  EXPECT_EQ(call->q_lens, (Ints{2}));
  EXPECT_FALSE(call->key_ranges);
  EXPECT_EQ(*call->mask, (std::vector<uint8_t>{0x7F, 0x20}));  // of positions 1, 3, ..., 15
  EXPECT_EQ(
      message_of([&] { call_of(share, {13}, {.mask = mask}); }),
      "sequence_call: mask must have a row for position 13 of request 0"
  );
  EXPECT_EQ(
      message_of([&] { call_of(share, {16}, {.mask = mask}); }),
      "sequence_call: mask must have a row for position 16 of request 0"
  );
  const Ints more_bits{17}, last{16};  // one bit more than two bytes have
  const RowMask cut{std::span(bits).first(2), zero, more_bits, last};
  EXPECT_EQ(
      message_of([&] { call_of(share_of(17, {2, 1}, 1), {16}, {.mask = cut}); }),
      "sequence_call: mask must have a row for position 16 of request 0"
  );
}

TEST(SequenceCallTest, Refusals) {
  const KeyShare share = share_of(16, {2, 1}, 0);
  const LocalPages pages = share.local_pages();
  const auto refusal = [&](const Ints& request, const Ints& position, const LocalPages& where) {
    return message_of([&] { sequence_call(share, where, {request, position}, {}); });
  };
  EXPECT_EQ(
      refusal({0}, {}, pages),
      "sequence_call: request and position must have the same size, got 1 and 0"
  );
  EXPECT_EQ(refusal({1}, {0}, pages), "sequence_call: request must be in [0, 1), got 1 at index 0");
  EXPECT_EQ(refusal({0}, {-1}, pages), "sequence_call: position must be >= 0, got -1 at index 0");
  EXPECT_EQ(
      refusal({0}, {15}, {.page_size = 4, .indptr = {0, 1}, .ids = {0}}),
      "sequence_call: pages must have the 8 keys of request 0"
  );
  EXPECT_EQ(
      refusal({0}, {15}, {.page_size = 4, .indptr = {0}}),
      "sequence_call: pages must be of 1 requests, got 0"
  );
  EXPECT_EQ(
      message_of([&] { call_of(share, {1}, {.window = KeyWindow{.left = 3, .right = -1}}); }),
      "sequence_call: window must be >= 0 (0: a token sees itself), got -1"
  );
}

}  // namespace
}  // namespace cpattn
