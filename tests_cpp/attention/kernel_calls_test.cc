// SPDX-License-Identifier: Apache-2.0
// What the attention kernels tell their caller and ask it, and what they leave out.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/kernel_problem.h"

namespace cpattn {
namespace {

using testing::KernelProblem;
using testing::KernelResult;
using testing::Marks;

class AttentionKernelCall : public testing::AttentionKernelTest {};

TEST_P(AttentionKernelCall, StopsBetweenBlocks) {
  KernelProblem problem = many_rows()[0];
  KernelResult result = problem.empty_result();
  problem.blocks = 1;
  EXPECT_FALSE(problem.run(result, 0, problem.tokens, 0, problem.group));
  EXPECT_TRUE(result == problem.empty_result());
}

TEST_P(AttentionKernelCall, SaysWhatItIsDoingAndHowMuch) {
  // Every row sees every key, and both fill whole tiles and granules: no flop is for nothing.
  KernelProblem problem = filled(
      {.tokens = 40, .group = 2, .dim = 48, .v_dim = 32, .kv_len = 512, .right = 512, .scale = 0.1F}
  );
  const KernelResult silent = problem.run();
  Marks marks;
  problem.marks = &marks;
  EXPECT_TRUE(problem.run() == silent);
  std::vector<int64_t> flops(5, 0);
  for (const auto& [scope, work] : marks) flops.at(scope) += work;
  const int64_t pairs = problem.tokens * problem.group * problem.kv_len;
  EXPECT_EQ(flops[kernels::kMarkQk], 2 * pairs * problem.dim);
  EXPECT_EQ(flops[kernels::kMarkPv], 2 * pairs * problem.v_dim);
  EXPECT_EQ(flops[kernels::kMarkPack], 0);
  EXPECT_EQ(flops[kernels::kMarkSoftmax], 0);
  EXPECT_EQ(marks.front().first, kernels::kMarkPack);
  EXPECT_EQ(marks.back().first, kernels::kMarkWrite);
}

TEST_P(AttentionKernelCall, SkipsKeysThatTheMaskHidesFromAll) {
  KernelProblem problem = filled({.tokens = 40, .group = 2, .kv_len = 1500, .right = 1500});
  problem.mask.assign(problem.tokens * problem.mask_stride(), 0);
  for (int64_t token = 0; token < problem.tokens; ++token) {  // all but keys 1280 to 1407
    std::fill_n(problem.mask.begin() + token * problem.mask_stride() + 1280 / 8, 128 / 8, 0xff);
  }
  Marks marks;
  problem.marks = &marks;
  problem.expect_right();
  int64_t flops = 0;
  for (const auto& [scope, work] : marks) flops += scope == kernels::kMarkQk ? work : 0;
  EXPECT_EQ(flops, 2 * problem.tokens * problem.group * problem.dim * 128);
}

TEST_P(AttentionKernelCall, OtherKernelsMayRunInItsPolls) {
  const KernelProblem outer =
      filled({.tokens = 70, .group = 2, .dim = 64, .kv_len = 2500, .first_position = 2430});
  const KernelProblem inner =
      filled({.tokens = 9, .dim = 48, .kv_len = 700, .first_position = 691});
  const KernelResult clean = outer.run();
  const KernelResult clean_inner = inner.run();
  int nested = 0;
  KernelProblem::at_polls = [&] {
    ++nested;
    EXPECT_TRUE(inner.run() == clean_inner);
  };
  const KernelResult result = outer.run();
  KernelProblem::at_polls = nullptr;
  EXPECT_TRUE(result == clean);
  EXPECT_GT(nested, 1);
}

INSTANTIATE_TEST_SUITE_P(
    Isa, AttentionKernelCall, testing::all_kernels(), testing::kernel_test_name
);

}  // namespace
}  // namespace cpattn
