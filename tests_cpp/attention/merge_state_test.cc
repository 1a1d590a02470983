// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/merge_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpattn/base/parallel.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::view;

class MergeState : public ::testing::Test {
 protected:
  void TearDown() override { set_num_threads(before_); }

 private:
  int before_ = default_num_threads();
};

/// Two parts of `tokens` rows of two heads of dimension 48.
struct Parts {
  explicit Parts(int64_t num_tokens)
      : tokens(num_tokens),
        out_a(testing::random_floats(tokens * 96, 1)),
        lse_a(testing::random_floats(tokens * 2, 2)),
        out_b(testing::random_floats(tokens * 96, 3)),
        lse_b(testing::random_floats(tokens * 2, 4)) {}

  void merge() {
    merge_state(
        view(out_a, DType::float32, {tokens, 2, 48}), view(lse_a, DType::float32, {tokens, 2}),
        view(out_b, DType::float32, {tokens, 2, 48}), view(lse_b, DType::float32, {tokens, 2})
    );
  }

  int64_t tokens;
  std::vector<float> out_a, lse_a, out_b, lse_b;
};

TEST_F(MergeState, IsTheSameOnAnyNumberOfThreads) {
  for (const int64_t tokens : {0, 1, 682, 683, 5000}) {  // an item has 682
    Parts alone(tokens);
    const Parts before = alone;
    set_num_threads(1);
    alone.merge();
    for (int64_t row = 0; row < 2 * tokens; row += 97) {
      const double a = std::exp(before.lse_a[row]), b = std::exp(before.lse_b[row]);
      EXPECT_NEAR(alone.lse_a[row], std::log(a + b), 1e-6);
      const double x = before.out_a[48 * row + 5], y = before.out_b[48 * row + 5];
      EXPECT_NEAR(alone.out_a[48 * row + 5], (a * x + b * y) / (a + b), 1e-6);
    }
    for (const int threads : {2, 5}) {
      Parts shared = before;
      set_num_threads(threads);
      shared.merge();
      EXPECT_EQ(shared.out_a, alone.out_a);
      EXPECT_EQ(shared.lse_a, alone.lse_a);
    }
  }
}

/// The parts of a call, in one buffer: outs [tokens, parts, 2, 48] and lses [tokens, parts, 2].
struct ManyParts {
  ManyParts(int64_t num_tokens, int64_t num_parts)
      : tokens(num_tokens),
        parts(num_parts),
        outs(testing::random_floats(tokens * parts * 96, 1)),
        lses(testing::random_floats(tokens * parts * 2, 2)),
        out(tokens * 96),
        lse(tokens * 2) {}

  TensorView view_of_out() { return view(out, DType::float32, {tokens, 2, 48}); }
  TensorView view_of_lse() { return view(lse, DType::float32, {tokens, 2}); }
  void merge() {
    merge_states(
        view(outs, DType::float32, {tokens, parts, 2, 48}),
        view(lses, DType::float32, {tokens, parts, 2}), std::nullopt, view_of_out(), view_of_lse()
    );
  }
  void merge_by_pairs() {
    for (int64_t i = 0; i < parts; ++i) {
      TensorView part{.data = outs.data() + 96 * i, .rank = 3, .shape = {tokens, 2, 48}};
      TensorView lse_of_part{.data = lses.data() + 2 * i, .rank = 2, .shape = {tokens, 2}};
      part.strides = {96 * parts, 48, 1};
      lse_of_part.strides = {2 * parts, 1};
      if (i > 0) {
        merge_state(view_of_out(), view_of_lse(), part, lse_of_part);
        continue;
      }
      for (int64_t t = 0; t < tokens; ++t) {
        std::copy_n(&outs[96 * parts * t], 96, &out[96 * t]);
        std::copy_n(&lses[2 * parts * t], 2, &lse[2 * t]);
      }
    }
  }

  int64_t tokens, parts;
  std::vector<float> outs, lses, out, lse;
};

TEST_F(MergeState, OfManyPartsHasTheBitsOfPairsOnAnyNumberOfThreads) {
  for (const int64_t parts : {1, 2, 3, 9, 70}) {
    for (const int64_t tokens : {0, 1, 300}) {
      ManyParts by_pairs(tokens, parts);
      by_pairs.merge_by_pairs();
      for (const int threads : {1, 2, 5}) {
        ManyParts at_once(tokens, parts);
        set_num_threads(threads);
        at_once.merge();
        EXPECT_EQ(at_once.out, by_pairs.out) << parts << ' ' << tokens;
        EXPECT_EQ(at_once.lse, by_pairs.lse) << parts << ' ' << tokens;
      }
    }
  }
}

TEST_F(MergeState, TakesAnyNumberOfPartsWithoutElements) {
  std::vector<float> none;
  const TensorView out = view(none, DType::float32, {0, 2, 48});
  const TensorView lse = view(none, DType::float32, {0, 2});
  const int64_t many = int64_t{1} << 50;
  const TensorView outs = view(none, DType::float32, {0, many, 2, 48});
  EXPECT_NO_THROW(
      merge_states(outs, view(none, DType::float32, {0, many, 2}), std::nullopt, out, lse)
  );
  EXPECT_THROW(
      merge_states(
          view(none, DType::float32, {0, 0, 2, 48}), view(none, DType::float32, {0, 0, 2}),
          std::nullopt, out, lse
      ),
      std::invalid_argument
  );
}

TEST_F(MergeState, WeightsVanishBeforeTheyAreSubnormal) {
  set_num_threads(1);
  for (int quarter = 160; quarter < 440; ++quarter) {
    const float gap = 0.25F * static_cast<float>(quarter);
    Parts parts(4);
    for (float& lse : parts.lse_a) lse += gap;
    EXPECT_FALSE(testing::meets_subnormals([&] { parts.merge(); })) << gap;
  }
}

TEST_F(MergeState, EndsWhereItIsInterrupted) {
  constexpr int64_t kRows = 20'000'000;  // tenths of a second, and a poll every twentieth
  std::vector<float> out(kRows, 1.0F), lse(kRows, 0.0F), two(1, 2.0F), zero(1, 0.0F);
  TensorView other = view(two, DType::float32, {1, 1, 1});
  TensorView other_lse = view(zero, DType::float32, {1, 1});
  for (TensorView* tensor : {&other, &other_lse}) {
    tensor->shape[0] = kRows;
    tensor->strides[0] = 0;
  }
  set_num_threads(1);
  const InterruptScope scope([] { return true; });
  EXPECT_THROW(
      merge_state(
          view(out, DType::float32, {kRows, 1, 1}), view(lse, DType::float32, {kRows, 1}), other,
          other_lse
      ),
      Interrupted
  );
  EXPECT_EQ(out.front(), 1.5F);
  EXPECT_EQ(out.back(), 1.0F);
  for (int64_t row = 0; row < kRows; row += 1001) {
    ASSERT_EQ(out[row] == 1.5F, lse[row] != 0.0F) << row;
  }
}

}  // namespace
}  // namespace cpattn
