// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/cp_indexer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpattn/npu/lightning_indexer.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

constexpr int64_t kHeads = 3, kDim = 32, kTopk = 5, kPageSize = 4;

/// One sequence of 12 keys, the last 8 of them new, in three pages that end where their buffer
/// does, so that a sanitizer sees any overrun.
class CpIndexer : public testing::EveryIsa {
 protected:
  static constexpr int64_t kKeys = 12, kQueries = 8;

  CpIndexer() : table_{2, 0, 1}, pages_(keys_.size()) {
    for (int64_t block = 0; block < 3; ++block) {
      std::copy_n(
          keys_.begin() + block * kPageSize * kDim, kPageSize * kDim,
          pages_.begin() + table_[block] * kPageSize * kDim
      );
    }
  }

  IndexTable block_tables() const {
    return {.data = table_.data(), .rows = 1, .columns = 3, .row_stride = 3};
  }

  /// Without context parallelism or pages.
  std::vector<int32_t> expected() {
    std::vector<int32_t> indices(kQueries * kTopk);
    std::vector<int64_t> begins(kQueries, 0), ends;
    for (int64_t i = 1; i <= kQueries; ++i) ends.push_back(kKeys - kQueries + i);
    indexer_topk(
        {.function = "test",
         .q = view(q_, DType::float32, {kQueries, kHeads, kDim}),
         .weights = view(weights_, DType::float32, {kQueries, kHeads}),
         .keys = flat_index_keys("test", view(keys_, DType::float32, {kKeys, kDim}), std::nullopt),
         .pages = {.indptr = {0, 1}, .page_ids = {0}},
         .rows = flat_indexer_rows("test", begins, ends, kQueries, kKeys)},
        {.topk = kTopk, .indices = view(indices, DType::int32, {kQueries, kTopk})}
    );
    return indices;
  }

  std::vector<float> q_ = random_floats(kQueries * kHeads * kDim, 1);
  std::vector<float> weights_ = random_floats(kQueries * kHeads, 2);
  std::vector<float> keys_ = random_floats(kKeys * kDim, 3);
  std::vector<int32_t> table_;
  std::vector<float> pages_;
};

TEST_P(CpIndexer, RanksTogetherAreTheWhole) {
  const std::vector<int64_t> extend = {kQueries}, seq = {kKeys};
  const CpBatch batch{.extend_lens = extend, .seq_lens = seq, .cp_size = 2};
  const std::vector<int32_t> whole = expected();
  for (const ContextParallelMetadata& metadata : build_cp_metadata_all_ranks(batch)) {
    std::vector<float> q, weights;
    for (const int32_t i : local_q_indices(metadata)) {
      q.insert(q.end(), &q_[i * kHeads * kDim], &q_[i * kHeads * kDim] + kHeads * kDim);
      weights.insert(weights.end(), &weights_[i * kHeads], &weights_[i * kHeads] + kHeads);
    }
    const int64_t rows = metadata.num_local_rows();
    std::vector<int32_t> indices(rows * kTopk);
    cp_indexer_topk(
        metadata, {
                      .q = view(q, DType::float32, {rows, kHeads, kDim}),
                      .weights = view(weights, DType::float32, {rows, kHeads}),
                      .index_k_cache = view(pages_, DType::float32, {3, kPageSize, kDim}),
                      .block_tables = block_tables(),
                      .page_size = kPageSize,
                      .topk = kTopk,
                      .indices = view(indices, DType::int32, {rows, kTopk}),
                  }
    );
    for (int64_t row = 0; const int32_t i : local_q_indices(metadata)) {
      for (int64_t j = 0; j < kTopk; ++j) {
        EXPECT_EQ(indices[row * kTopk + j], whole[i * kTopk + j]) << row << ' ' << j;
      }
      ++row;
    }
  }
}

TEST_P(CpIndexer, PackedPagesOfCodesAndScales) {
  constexpr uint8_t kOne = 0x38, kTwo = 0x40;  // of float8_e4m3fn
  constexpr int64_t kPageBytes = kPageSize * (kDim + 4);
  std::vector<uint8_t> cache(2 * kPageBytes, kOne), q(kDim, kTwo);
  const std::vector<float> scales = {1, 4, 2, 8, 16, 0.5, 32, 64};
  for (int64_t page = 0; page < 2; ++page) {
    std::memcpy(&cache[page * kPageBytes + kPageSize * kDim], &scales[page * kPageSize], 16);
  }
  const std::vector<int64_t> extend = {1}, seq = {7};
  const std::vector<int32_t> table = {1, 0};
  std::vector<float> weight = {1};
  std::vector<int32_t> indices(3);
  cp_indexer_topk(
      build_cp_metadata({.extend_lens = extend, .seq_lens = seq}, 0),
      {
          .q = view(q, DType::float8_e4m3fn, {1, 1, kDim}),
          .weights = view(weight, DType::float32, {1, 1}),
          .index_k_cache = view(cache, DType::uint8, {2, kPageBytes}),
          .block_tables = {.data = table.data(), .rows = 1, .columns = 2, .row_stride = 2},
          .page_size = kPageSize,
          .topk = 3,
          .indices = view(indices, DType::int32, {1, 3}),
      }
  );
  EXPECT_EQ(indices, (std::vector<int32_t>{3, 2, 0}));
}

TEST_P(CpIndexer, OperatorOnPagesAndOnRows) {
  LightningIndexerArguments arguments{
      .query = view(q_, DType::float32, {kQueries, kHeads, kDim}),
      .key = view(pages_, DType::float32, {3, kPageSize, 1, kDim}),
      .weights = view(weights_, DType::float32, {kQueries, kHeads}),
      .actual_seq_lengths_query = {{kQueries}},
      .actual_seq_lengths_key = {{kKeys}},
      .block_table = block_tables(),
      .layout_query = "TND",
      .layout_key = "PA_BSND",
      .sparse_count = kTopk,
  };
  std::vector<int32_t> paged(kQueries * kTopk), packed(kQueries * kTopk);
  std::vector<float> values(kQueries * kTopk);
  arguments.indices = view(paged, DType::int32, {kQueries, 1, kTopk});
  npu_lightning_indexer(arguments);
  EXPECT_EQ(paged, expected());

  arguments.key = view(keys_, DType::float32, {kKeys, 1, kDim});
  arguments.block_table.reset();
  arguments.layout_key = "TND";
  arguments.indices = view(packed, DType::int32, {kQueries, 1, kTopk});
  arguments.values = view(values, DType::float32, {kQueries, 1, kTopk});
  npu_lightning_indexer(arguments);
  EXPECT_EQ(packed, expected());
  for (std::size_t i = values.size() - kTopk + 1; i < values.size(); ++i) {
    EXPECT_GE(values[i - 1], values[i]);
  }
}

TEST_P(CpIndexer, OperatorRefusesResultsBeyondInt64) {
  std::vector<int32_t> nothing;
  const LightningIndexerArguments arguments{
      .query = view(q_, DType::float32, {kQueries, kHeads, kDim}),
      .key = view(keys_, DType::float32, {kKeys, 1, kDim}),
      .weights = view(weights_, DType::float32, {kQueries, kHeads}),
      .actual_seq_lengths_query = {{kQueries}},
      .actual_seq_lengths_key = {{kKeys}},
      .layout_query = "TND",
      .layout_key = "TND",
      .sparse_count = INT64_MAX / 2,
      .indices = view(nothing, DType::int32, {kQueries, 1, 0}),
  };
  EXPECT_THROW(npu_lightning_indexer(arguments), std::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(
    , CpIndexer, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
