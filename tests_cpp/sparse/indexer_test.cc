// SPDX-License-Identifier: Apache-2.0
// The indexer over pages, with values, and how its work is divided. Scores themselves
// are tested from Python, and those of int8 here, where emulated processors try them, too.
#include "cpattn/sparse/indexer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/sparse/indexer_items.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

constexpr int64_t kHeads = 5, kDim = 32, kPage = 64;

/// Two sequences in shuffled pages of 64 codes of e4m3fn and then 64 scales, and the same
/// keys one after the other.
struct Paged {
  static constexpr int64_t kNumKeys[] = {400, 300};
  static constexpr int64_t kPageBytes = kPage * (kDim + 4);

  std::vector<uint8_t> cache, flat[2];
  std::vector<float> scales[2];
  PageTable pages{.indptr = {0, 7, 12}, .page_ids = {9, 4, 11, 0, 7, 1, 10, 5, 2, 8, 3, 6}};

  Paged() : cache(12 * kPageBytes, 0x7f) {
    std::mt19937 generator(3);
    for (int sequence = 0; sequence < 2; ++sequence) {
      for (int64_t key = 0; key < kNumKeys[sequence]; ++key) {
        const int32_t page = pages.page_ids[pages.indptr[sequence] + key / kPage];
        uint8_t* codes = cache.data() + page * kPageBytes;
        for (int64_t d = 0; d < kDim; ++d) {
          const auto code = static_cast<uint8_t>(generator() % 0x70 | (generator() & 0x80));
          codes[key % kPage * kDim + d] = code;
          flat[sequence].push_back(code);
        }
        const float scale = 0.25F + static_cast<float>(generator() % 100);
        std::memcpy(codes + kPage * kDim + key % kPage * 4, &scale, sizeof scale);
        scales[sequence].push_back(scale);
      }
    }
  }

  IndexKeys keys() const {
    return {
        .data = cache.data(),
        .dtype = DType::float8_e4m3fn,
        .dim = kDim,
        .num_pages = 12,
        .page_size = kPage,
        .page_bytes = kPageBytes,
        .row_bytes = kDim,
        .scales = cache.data() + kPage * kDim,
        .scale_page_bytes = kPageBytes,
        .scale_row_bytes = 4,
    };
  }
};

class Indexer : public testing::EveryIsa {
 protected:
  Indexer() : q_(6 * kHeads * kDim), weights_(random_floats(6 * kHeads, 4)) {
    std::mt19937 generator(5);
    for (uint8_t& code : q_) code = static_cast<uint8_t>(generator() % 0x70);
  }

  IndexerArguments arguments(
      const IndexKeys& keys, const PageTable& pages, std::span<const IndexerRow> rows
  ) {
    return {
        .function = "test",
        .q = view(q_, DType::float8_e4m3fn, {6, kHeads, kDim}),
        .weights = view(weights_, DType::float32, {6, kHeads}),
        .keys = keys,
        .pages = pages,
        .rows = rows,
    };
  }

  std::vector<float> logits_of(const IndexerArguments& arguments, int64_t columns) {
    std::vector<float> logits(6 * columns);
    indexer_logits(arguments, view(logits, DType::float32, {6, columns}));
    return logits;
  }

  Paged paged_;
  std::vector<uint8_t> q_;
  std::vector<float> weights_;
  /// Queries 1 and 4 have no keys.
  const std::vector<IndexerRow> rows_ = {
      {.query = 5, .table_row = 0, .begin = 0, .end = 400},
      {.query = 0, .table_row = 0, .begin = 70, .end = 390},
      {.query = 2, .table_row = 1, .begin = 3, .end = 300},
      {.query = 3, .table_row = 1, .begin = 100, .end = 120},
      {.query = 4, .table_row = 7, .begin = 9, .end = 9},
  };
};

TEST_P(Indexer, PagesDoNotChangeTheBits) {
  const std::vector<float> logits = logits_of(arguments(paged_.keys(), paged_.pages, rows_), 400);
  EXPECT_TRUE(std::all_of(&logits[400], &logits[800], [](float x) { return x == -INFINITY; }));
  for (IndexerRow row : rows_) {
    if (row.begin == row.end) continue;
    const auto sequence = row.table_row;
    const int64_t num_keys = Paged::kNumKeys[sequence];
    const IndexKeys flat = flat_index_keys(
        "test", view(paged_.flat[sequence], DType::float8_e4m3fn, {num_keys, kDim}),
        view(paged_.scales[sequence], DType::float32, {num_keys})
    );
    row.table_row = 0;
    const PageTable one{.indptr = {0, 1}, .page_ids = {0}};
    const std::vector<float> expected = logits_of(arguments(flat, one, {&row, 1}), 400);
    const auto begin = row.query * 400;
    EXPECT_TRUE(std::equal(&logits[begin], &logits[begin + 400], &expected[begin]));
  }
}

TEST_P(Indexer, ValuesStandBesideTheirIndices) {
  const IndexerArguments given = arguments(paged_.keys(), paged_.pages, rows_);
  const std::vector<float> logits = logits_of(given, 400);
  constexpr int64_t kTopk = 40;
  for (bool sorted : {true, false}) {
    std::vector<int32_t> indices(6 * kTopk), plain(6 * kTopk);
    std::vector<float> values(6 * kTopk);
    IndexerTopk result{
        .topk = kTopk, .sorted = sorted, .indices = view(plain, DType::int32, {6, kTopk})
    };
    indexer_topk(given, result);
    result.indices = view(indices, DType::int32, {6, kTopk});
    result.values = view(values, DType::float32, {6, kTopk});
    indexer_topk(given, result);
    EXPECT_EQ(indices, plain);
    std::vector<float> expected(6 * kTopk, -INFINITY);
    for (const IndexerRow& row : rows_) {
      for (int64_t i = row.query * kTopk; i < (row.query + 1) * kTopk; ++i) {
        if (indices[i] >= 0) expected[i] = logits[row.query * 400 + row.begin + indices[i]];
      }
      const auto* first = &values[row.query * kTopk];
      if (sorted && row.end - row.begin > kTopk) {
        EXPECT_TRUE(std::is_sorted(first, first + kTopk, std::greater<>()));
      }
    }
    EXPECT_EQ(values, expected);
  }
}

/// An empty tensor may have the address of another one: no key overlaps the result there.
TEST_P(Indexer, NoKeysTakeNoMemory) {
  std::vector<int32_t> indices(6 * 3, 7);
  const IndexKeys keys =
      flat_index_keys("test", view(indices, DType::float8_e4m3fn, {0, kDim}), std::nullopt);
  const PageTable one{.indptr = {0, 1}, .page_ids = {0}};
  const IndexerRow row{.query = 2, .begin = 0, .end = 0};
  indexer_topk(
      arguments(keys, one, {&row, 1}), {.topk = 3, .indices = view(indices, DType::int32, {6, 3})}
  );
  EXPECT_EQ(indices, std::vector<int32_t>(6 * 3, -1));
}

/// Integers: products of the largest codes, and sums that float32 holds.
TEST_P(Indexer, ScoresOfInt8AreExact) {
  std::mt19937 generator(6);
  for (const int64_t dim : {16, 48, 256}) {
    constexpr int64_t kKeys = 70;
    std::vector<int8_t> q(6 * kHeads * dim, -128), k(kKeys * dim, -128);
    const auto random = [&] { return static_cast<int8_t>(generator() % 31 - 15); };
    std::generate(q.begin() + kHeads * dim, q.end(), random);
    std::generate(k.begin() + 9 * dim, k.end(), random);
    std::vector<float> weights(6 * kHeads, 0.5F);
    const IndexKeys keys =
        flat_index_keys("test", view(k, DType::int8, {kKeys, dim}), std::nullopt);
    const PageTable one{.indptr = {0, 1}, .page_ids = {0}};
    std::vector<IndexerRow> rows(6);
    for (int64_t i = 0; i < 6; ++i) rows[i] = {.query = i, .begin = i, .end = kKeys - i};
    const std::vector<float> logits = logits_of(
        {.function = "test",
         .q = view(q, DType::int8, {6, kHeads, dim}),
         .weights = view(weights, DType::float32, {6, kHeads}),
         .keys = keys,
         .pages = one,
         .rows = rows},
        kKeys
    );
    for (const IndexerRow& row : rows) {
      for (int64_t j = row.begin; j < row.end; ++j) {
        int64_t sum = 0;
        for (int64_t h = 0; h < kHeads; ++h) {
          const int8_t* head = &q[(row.query * kHeads + h) * dim];
          sum += std::max(0, std::inner_product(head, head + dim, &k[j * dim], 0));
        }
        ASSERT_EQ(logits[row.query * kKeys + j], static_cast<float>(sum) / 2) << dim << ' ' << j;
      }
    }
  }
}

TEST_P(Indexer, RefusesRowsThatAreNotThere) {
  const auto logits = [&](IndexerRow row) {
    logits_of(arguments(paged_.keys(), paged_.pages, {&row, 1}), 500);
  };
  EXPECT_THROW(logits({.query = 6, .end = 1}), std::invalid_argument);
  EXPECT_THROW(logits({.query = -1, .end = 1}), std::invalid_argument);
  EXPECT_THROW(logits({.table_row = 2, .end = 1}), std::invalid_argument);
  EXPECT_THROW(logits({.begin = -1, .end = 1}), std::invalid_argument);
  EXPECT_THROW(logits({.table_row = 1, .end = 5 * kPage + 1}), std::invalid_argument);
  EXPECT_NO_THROW(logits({.table_row = 1, .end = 5 * kPage}));
}

TEST_P(Indexer, NoKeysWhateverTheirRange) {
  const IndexerRow row{.table_row = -1, .begin = INT64_MAX, .end = INT64_MIN};
  std::vector<int32_t> indices(6, 0);
  indexer_topk(
      arguments(paged_.keys(), paged_.pages, {&row, 1}),
      {.topk = 1, .indices = view(indices, DType::int32, {6, 1})}
  );
  EXPECT_EQ(indices, std::vector<int32_t>(6, -1));
}

INSTANTIATE_TEST_SUITE_P(
    Isas, Indexer, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

TEST(IndexerItems, HoldEveryScoreOnce) {
  std::mt19937 generator(1);
  for (int64_t num_rows : {1, 15, 33, 200}) {
    std::vector<IndexerRow> rows(num_rows);
    int64_t num_scores = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t begin = generator() % 1000;
      rows[i] = {i, i / 20, begin, begin + 20000 + static_cast<int64_t>(generator() % 50000)};
      num_scores += rows[i].end - begin;
    }
    for (int threads : {1, 2, 9}) {
      const IndexerItems work = make_indexer_items(rows, threads);
      std::vector<int64_t> slots;
      int64_t costs = 0;
      for (const IndexerItem& item : work.items) {
        EXPECT_EQ(rows[item.begin].table_row, rows[item.begin + item.count - 1].table_row);
        costs += item.cost;
        for (int64_t i = 0; item.num_parts > 1 && i < item.count; ++i) {
          slots.push_back(item.slot(i));
        }
      }
      EXPECT_EQ(costs, num_scores);
      std::sort(slots.begin(), slots.end());
      std::vector<int64_t> expected(work.num_slots);
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(slots, expected);
      if (num_rows == 1) {
        EXPECT_EQ(work.num_slots > 0, threads > 1);
      }
    }
  }
}

TEST(IndexerItems, KeepLittleHoweverMuchIsSelected) {
  constexpr int64_t kKeys = 1 << 20;
  const std::vector<IndexerRow> rows(64, {.end = kKeys});
  for (int64_t topk : {1, 2048, 1 << 14, 1 << 20}) {
    const IndexerItems work = make_indexer_items(rows, 64, topk);
    for (const IndexerItem& item : work.items) {
      EXPECT_LE(item.count * topk, std::max<int64_t>(topk, 1 << 17));
    }
    EXPECT_LE(work.num_slots * topk, std::ssize(rows) * kKeys / 4);
  }
}

}  // namespace
}  // namespace cpattn
