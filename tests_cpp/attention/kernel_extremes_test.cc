// SPDX-License-Identifier: Apache-2.0
// Scores and values that are large, infinite or NaN, in the attention kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernel_problem.h"

namespace cpattn {
namespace {

using testing::KernelProblem;
using testing::KernelResult;
using testing::kInfinity;
using testing::kNan;
using testing::to_bfloat16;
using testing::to_float;

class AttentionKernelExtremes : public testing::AttentionKernelTest {};

TEST_P(AttentionKernelExtremes, ScoresMayOutgrowEarlierOnes) {
  // Query 1, key g: in base 2 the score is g. Around the factor 2^8 that keeps a
  // reference, beyond what an exponent holds, in the chunk, the block and the
  // sequence that they fall into first; behind few keys and behind many.
  constexpr float kLn2 = 0.693147181F;
  for (float growth :
       {1.0F, 7.0F, 7.9375F, 8.0F, 8.0625F, 9.0F, 15.0F, 16.0F, 127.0F, 128.0F, 250.0F, 300.0F,
        1e4F, 1e9F, 1e30F}) {
    for (int64_t from : {1, 31, 32, 200, 256, 299}) {
      KernelProblem problem =
          filled({.dim = 16, .kv_len = 310, .first_position = 309, .scale = kLn2});
      std::fill(problem.q.begin() + 1, problem.q.end(), 0);
      problem.q[0] = to_bfloat16(1.0F);
      for (int64_t key = 0; key < problem.kv_len; ++key) {
        const float score = key < from ? 0.0F : key < 305 ? growth : 2 * growth;
        problem.k[key * problem.dim] = to_bfloat16(key % 2 == 0 ? score : -score);
      }
      problem.expect_right();
      if (HasFatalFailure()) FAIL() << "growth " << growth << " from key " << from;
    }
  }
}

TEST_P(AttentionKernelExtremes, HugeScoresAreCoarserThanTheirWeights) {
  // In base 2 an ulp of the largest score is up to 1 and 64. Keys that
  // share the score share the weight.
  for (float huge : {1e7F, 1e9F}) {
    for (float scale : {0.1F, 0.3F, 0.7F}) {
      KernelProblem problem =
          filled({.dim = 16, .kv_len = 310, .first_position = 309, .scale = scale});
      std::fill(problem.q.begin() + 1, problem.q.end(), 0);
      problem.q[0] = to_bfloat16(1.0F);
      for (int64_t key = 0; key < problem.kv_len; ++key) {
        problem.k[key * problem.dim] = to_bfloat16(key % 100 == 3 ? huge : -huge);
      }
      problem.expect_right();
      if (HasFatalFailure()) FAIL() << "score " << huge << ", scale " << scale;
    }
  }
}

TEST_P(AttentionKernelExtremes, WeightsVanishBeforeTheyAreSubnormal) {
  // Query 1, key g: in base 2 the score is g, that of one key ahead of all others. Values have one
  // sign, as sums of any numbers may cancel.
  for (int half = 120; half < 254; ++half) {
    const float gap = 0.5F * static_cast<float>(half);
    for (int64_t ahead : {0, 150, 309}) {
      KernelProblem problem =
          filled({.dim = 16, .kv_len = 310, .first_position = 309, .scale = 0.693147181F});
      std::fill(problem.q.begin() + 1, problem.q.end(), 0);
      problem.q[0] = to_bfloat16(1.0F);
      for (int64_t key = 0; key < problem.kv_len; ++key) {
        problem.k[key * problem.dim] = to_bfloat16(key == ahead ? gap : 0.0F);
      }
      for (uint16_t& value : problem.v) value &= 0x7fff;
      KernelResult result = problem.empty_result();
      ASSERT_FALSE(testing::meets_subnormals([&] { problem.run(result, 0, 1, 0, 1); }))
          << gap << " at key " << ahead;
    }
  }
}

TEST_P(AttentionKernelExtremes, MinusInfinityHasNoWeight) {
  KernelProblem problem = filled({.dim = 16, .kv_len = 300, .first_position = 299});
  std::fill(problem.q.begin(), problem.q.end(), to_bfloat16(1.0F));
  for (int64_t key = 0; key < 290; ++key) problem.k[key * 16] = to_bfloat16(-kInfinity);
  const KernelResult result = problem.run();
  for (int64_t key = 0; key < 290; ++key) problem.v[key * 32] = to_bfloat16(1e30F);
  EXPECT_TRUE(problem.run() == result);
  for (int64_t key = 290; key < 300; ++key) problem.k[key * 16] = to_bfloat16(-kInfinity);
  const KernelResult nothing = problem.run();
  EXPECT_EQ(nothing.lse[0], -kInfinity);
  EXPECT_EQ(nothing.out, std::vector<uint16_t>(32, 0));
}

TEST_P(AttentionKernelExtremes, NonFiniteKeysShowWhereTheyAreSeenOnly) {
  for (float poison : {kNan, -kNan, kInfinity}) {
    KernelProblem problem = many_rows()[0];
    const KernelResult clean = problem.run();
    const int token = 40;
    const int64_t key = problem.first_position + token;
    for (int d = 0; d < problem.dim; ++d) problem.k[key * problem.dim + d] = to_bfloat16(poison);
    const KernelResult result = problem.run();
    for (int row = 0; row < problem.tokens * problem.group; ++row) {
      if (row / problem.group < token) {
        ASSERT_EQ(result.lse[row], clean.lse[row]) << row;
      } else if (std::isnan(poison)) {
        ASSERT_TRUE(std::isnan(result.lse[row])) << row;
      }
      for (int d = 0; d < problem.v_dim; ++d) {
        const int i = row * problem.v_dim + d;
        if (row / problem.group < token) {
          ASSERT_EQ(result.out[i], clean.out[i]) << row;
        } else if (std::isnan(poison)) {
          ASSERT_TRUE(std::isnan(to_float(result.out[i]))) << row;
        }
      }
    }
  }
}

TEST_P(AttentionKernelExtremes, NonFiniteValuesShowWhereTheyAreSeenOnly) {
  for (float poison : {kNan, kInfinity, -kInfinity}) {
    KernelProblem problem = many_rows()[0];
    const KernelResult clean = problem.run();
    const int token = poison > 0 ? 41 : 40;  // either key of a pair
    const int poisoned = 5;                  // one dimension of the value of one key
    problem.v[(problem.first_position + token) * problem.v_dim + poisoned] = to_bfloat16(poison);
    const KernelResult result = problem.run();
    EXPECT_EQ(result.lse, clean.lse);
    for (std::size_t i = 0; i < result.out.size(); ++i) {
      const bool seen = static_cast<int>(i) / problem.v_dim / problem.group >= token;
      const float x = to_float(result.out[i]);
      if (!seen) {
        ASSERT_EQ(result.out[i], clean.out[i]) << i;
      } else if (static_cast<int>(i) % problem.v_dim != poisoned) {
        ASSERT_NEAR(x, to_float(clean.out[i]), 0x1p-6) << i;
      } else if (std::isnan(poison)) {
        ASSERT_TRUE(std::isnan(x)) << i;
      } else {
        ASSERT_EQ(x, poison) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, AttentionKernelExtremes, testing::all_kernels(), testing::kernel_test_name
);

}  // namespace
}  // namespace cpattn
