// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/topk.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::view;
using Ints = std::vector<int32_t>;

/// Two rows of six scores; 1 and 5 tie in the first, and the second has two candidates.
struct Batch {
  std::vector<float> score = {9, 4, 1, 2, 3, 4, 0, 0, 0, 8, 7, 0};
  std::vector<int64_t> lengths = {5, 2}, row_starts = {1, 3};
  Ints out = Ints(6);

  TopkArguments arguments(bool sorted) {
    return {
        .function = "test",
        .score = view(score, DType::float32, {2, 6}),
        .lengths = lengths,
        .row_starts = row_starts,
        .topk = 3,
        .sorted = sorted,
    };
  }
  TensorView result() { return view(out, DType::int32, {2, 3}); }
};

TEST(Topk, IndicesAreRelativeToTheRowStart) {
  Batch batch;
  fast_topk(batch.arguments(true), batch.result());
  EXPECT_EQ(batch.out, (Ints{0, 4, 3, 0, 1, -1}));
  fast_topk(batch.arguments(false), batch.result());
  EXPECT_EQ(batch.out, (Ints{0, 3, 4, 0, 1, -1}));
}

TEST(Topk, TableWithoutColumnsNeedsNoMemory) {
  const Ints nothing = {-1, -1};
  Ints out(2);
  transform_index_page_table_decode(
      {.pages = {.rows = 2, .columns = 0, .row_stride = 1}},
      {.data = nothing.data(), .rows = 2, .columns = 1, .row_stride = 1},
      view(out, DType::int32, {2, 1})
  );
  EXPECT_EQ(out, nothing);
}

TEST(Topk, SlotsAndRows) {
  Batch batch;
  const Ints pages = {5, 0, 7, 3, 1, 2};  // two rows of three pages of two
  const std::vector<int64_t> indptr = {0, 2}, rows = {1}, offsets = {0, 10};
  const TopkSlots slots = {
      .table = {{.data = pages.data(), .rows = 2, .columns = 3, .row_stride = 3}, 2},
      .cu_seqlens_q = indptr,
      .batch_idx_list = rows,
  };
  const TopkArguments arguments = batch.arguments(true);
  topk_transform(arguments, TopkTransformMethod::paged, slots, {}, batch.result());
  EXPECT_EQ(batch.out, (Ints{6, 4, 3, 6, 7, -1}));
  topk_transform(arguments, TopkTransformMethod::ragged, {}, offsets, batch.result());
  EXPECT_EQ(batch.out, (Ints{0, 4, 3, 10, 11, -1}));
  EXPECT_THROW(
      topk_transform(arguments, TopkTransformMethod::ragged, slots, {}, batch.result()),
      std::runtime_error
  );
}

TEST(Topk, ManyRowsOnManyThreads) {
  constexpr int64_t kRows = 64, kColumns = 5000;
  std::vector<float> score = testing::random_floats(kRows * kColumns, 5);
  const std::vector<int64_t> lengths(kRows, kColumns);
  Ints together(kRows * 40), alone(40);
  TopkArguments arguments = {
      .function = "test",
      .score = view(score, DType::float32, {kRows, kColumns}),
      .lengths = lengths,
      .row_starts = {},
      .topk = 40,
  };
  fast_topk(arguments, view(together, DType::int32, {kRows, 40}));
  arguments.score.shape[0] = 1;
  arguments.lengths = arguments.lengths.first(1);
  for (int64_t row = 0; row < kRows; ++row) {
    arguments.score.data = score.data() + row * kColumns;
    fast_topk(arguments, view(alone, DType::int32, {1, 40}));
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + row * 40)) << row;
  }
}

}  // namespace
}  // namespace cpattn
