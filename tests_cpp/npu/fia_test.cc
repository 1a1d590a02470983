// SPDX-License-Identifier: Apache-2.0
#include "cpattn/npu/fia.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "cpattn/reference/reference.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 16;
const std::vector<int64_t> kQueryLens = {3, 1, 5}, kKeyLens = {7, 4, 5};

int64_t sum(const std::vector<int64_t>& lens) {
  return std::accumulate(lens.begin(), lens.end(), int64_t{0});
}

std::vector<int64_t> running_sums(const std::vector<int64_t>& lens) {
  std::vector<int64_t> sums(lens.size());
  std::partial_sum(lens.begin(), lens.end(), sums.begin());
  return sums;
}

/// Packed rows [sum(lens), heads, dim] placed where `offset(b, s, n)` says, in a
/// buffer without a byte to spare, so that a sanitizer sees any overrun.
using Offset = std::function<int64_t(int64_t b, int64_t s, int64_t n)>;

std::vector<float> scatter(
    const std::vector<float>& packed,
    const std::vector<int64_t>& lens,
    int64_t heads,
    int64_t size,
    const Offset& offset
) {
  std::vector<float> values(size);
  int64_t row = 0;
  for (std::size_t b = 0; b < lens.size(); ++b) {
    for (int64_t s = 0; s < lens[b]; ++s, ++row) {
      for (int64_t n = 0; n < heads; ++n) {
        const auto from = packed.begin() + (row * heads + n) * kDim;
        std::copy(from, from + kDim, values.begin() + offset(static_cast<int64_t>(b), s, n));
      }
    }
  }
  return values;
}

struct Expected {
  std::vector<double> out, lse;
};

/// The oracle on the same packed sequences, causal; keys are pages of one token.
Expected expected(std::vector<float>& q, std::vector<float>& k, std::vector<float>& v) {
  Expected result{
      std::vector<double>(sum(kQueryLens) * kHeads * kDim),
      std::vector<double>(sum(kQueryLens) * kHeads)
  };
  const int64_t columns = 7;
  std::vector<int32_t> table(kKeyLens.size() * columns);
  int32_t page = 0;
  for (std::size_t b = 0; b < kKeyLens.size(); ++b) {
    for (int64_t j = 0; j < kKeyLens[b]; ++j) table[b * columns + j] = page++;
  }
  reference::paged_attention(
      {.q = view(q, DType::float32, {sum(kQueryLens), kHeads, kDim}),
       .k_cache = view(k, DType::float32, {sum(kKeyLens), kKvHeads, kDim}),
       .v_cache = view(v, DType::float32, {sum(kKeyLens), kKvHeads, kDim}),
       .page_size = 1,
       .q_lens = kQueryLens,
       .kv_lens = kKeyLens,
       .block_tables = {.data = table.data(), .rows = 3, .columns = columns, .row_stride = columns},
       .scale = 0.5},
      view(result.out, DType::float64, {sum(kQueryLens), kHeads, kDim}),
      view(result.lse, DType::float64, {sum(kQueryLens), kHeads})
  );
  return result;
}

class Fia : public ::testing::Test {
 protected:
  std::vector<float> q_ = random_floats(sum(kQueryLens) * kHeads * kDim, 1);
  std::vector<float> k_ = random_floats(sum(kKeyLens) * kKvHeads * kDim, 2);
  std::vector<float> v_ = random_floats(sum(kKeyLens) * kKvHeads * kDim, 3);
  std::vector<uint8_t> template_ = std::vector<uint8_t>(2048 * 2048);

  FiaArguments causal_arguments(const char* layout) {
    return {
        .atten_mask = view(template_, DType::bool8, {2048, 2048}),
        .num_heads = kHeads,
        .num_key_value_heads = kKvHeads,
        .scale = 0.5,
        .input_layout = layout,
        .sparse_mode = 3,
        .softmax_lse_flag = true,
    };
  }

  void run_and_compare(const FiaArguments& arguments, int64_t rows, const Offset& out_row) {
    const Expected want = expected(q_, k_, v_);
    const FiaPlan plan = plan_fia(arguments);
    std::vector<float> out(rows * kHeads * kDim), lse(rows * kHeads);
    TensorView out_view = view(out, DType::float32, {rows, kHeads, kDim});
    TensorView lse_view = view(lse, DType::float32, {rows, kHeads, 1});
    if (plan.out_shape.size() == 4) {
      const auto& s = plan.out_shape;
      out_view = view(out, DType::float32, {s[0], s[1], s[2], s[3]});
      lse_view = view(lse, DType::float32, {s[0], s[1], s[2], 1});
    }
    run_fia(plan, out_view, lse_view);
    int64_t row = 0;
    for (std::size_t b = 0; b < kQueryLens.size(); ++b) {
      for (int64_t s = 0; s < kQueryLens[b]; ++s, ++row) {
        for (int64_t n = 0; n < kHeads; ++n) {
          const int64_t at = out_row(static_cast<int64_t>(b), s, n);
          EXPECT_NEAR(lse[at / kDim], want.lse[row * kHeads + n], 1e-5);
          for (int64_t d = 0; d < kDim; ++d) {
            EXPECT_NEAR(out[at + d], want.out[(row * kHeads + n) * kDim + d], 1e-5);
          }
        }
      }
    }
  }
};

TEST_F(Fia, HeadsOutsideTokensAreOnePlanPerSequence) {
  const auto offset = [](int64_t heads, int64_t tokens) {
    return [=](int64_t b, int64_t s, int64_t n) { return ((b * heads + n) * tokens + s) * kDim; };
  };
  auto q = scatter(q_, kQueryLens, kHeads, 3 * kHeads * 5 * kDim, offset(kHeads, 5));
  auto k = scatter(k_, kKeyLens, kKvHeads, 3 * kKvHeads * 7 * kDim, offset(kKvHeads, 7));
  auto v = scatter(v_, kKeyLens, kKvHeads, 3 * kKvHeads * 7 * kDim, offset(kKvHeads, 7));
  FiaArguments arguments = causal_arguments("BNSD");
  arguments.query = view(q, DType::float32, {3, kHeads, 5, kDim});
  arguments.key = view(k, DType::float32, {3, kKvHeads, 7, kDim});
  arguments.value = view(v, DType::float32, {3, kKvHeads, 7, kDim});
  arguments.actual_seq_lengths = kQueryLens;
  arguments.actual_seq_lengths_kv = kKeyLens;
  EXPECT_EQ(plan_fia(arguments).plans.size(), 3U);
  run_and_compare(arguments, 15, offset(kHeads, 5));
}

TEST_F(Fia, PackedSequencesAreOnePlan) {
  FiaArguments arguments = causal_arguments("TND");
  arguments.query = view(q_, DType::float32, {sum(kQueryLens), kHeads, kDim});
  arguments.key = view(k_, DType::float32, {sum(kKeyLens), kKvHeads, kDim});
  arguments.value = view(v_, DType::float32, {sum(kKeyLens), kKvHeads, kDim});
  arguments.actual_seq_lengths = running_sums(kQueryLens);
  arguments.actual_seq_lengths_kv = running_sums(kKeyLens);
  EXPECT_EQ(plan_fia(arguments).plans.size(), 1U);
  const std::vector<int64_t> begins = {0, 3, 4};
  run_and_compare(arguments, sum(kQueryLens), [&](int64_t b, int64_t s, int64_t n) {
    return ((begins[b] + s) * kHeads + n) * kDim;
  });
}

TEST_F(Fia, AnEmptyQueryHasShapesAndNothingToRun) {
  FiaArguments arguments = causal_arguments("TND");
  arguments.query = view(q_, DType::float32, {0, kHeads, kDim});
  arguments.key = view(k_, DType::float32, {sum(kKeyLens), kKvHeads, kDim});
  arguments.value = view(v_, DType::float32, {sum(kKeyLens), kKvHeads, kDim});
  const FiaPlan plan = plan_fia(arguments);
  EXPECT_EQ(plan.out_shape, (std::vector<int64_t>{0, kHeads, kDim}));
  EXPECT_EQ(plan.lse_shape, (std::vector<int64_t>{0, kHeads, 1}));
  EXPECT_TRUE(plan.plans.empty());
}

TEST(PlanFia, RowOfABlockTableMayBeBroadcast) {
  std::vector<float> values(kHeads * kDim), cache(2 * kHeads * kDim);
  const int32_t block = 0;
  const FiaArguments arguments = {
      .query = view(values, DType::float32, {1, 1, kHeads * kDim}),
      .key = view(cache, DType::float32, {1, 2, kHeads * kDim}),
      .value = view(cache, DType::float32, {1, 2, kHeads * kDim}),
      .actual_seq_lengths_kv = std::vector<int64_t>{5},
      .block_table =
          IndexTable{.data = &block, .rows = 1, .columns = int64_t{1} << 62, .column_stride = 0},
      .num_heads = kHeads,
      .block_size = 2,
  };
  const FiaPlan plan = plan_fia(arguments);
  EXPECT_EQ(plan.plans.at(0).batch.pages.page_ids, (std::vector<int32_t>{0, 0, 0}));
}

}  // namespace
}  // namespace cpattn
