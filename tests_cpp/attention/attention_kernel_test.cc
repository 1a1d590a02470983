// SPDX-License-Identifier: Apache-2.0
// Results of the attention kernels: right, and the same whichever rows are computed together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/kernel_problem.h"

namespace cpattn {
namespace {

using testing::KernelProblem;
using testing::KernelResult;
using testing::Loops;
using testing::to_float;

class AttentionKernel : public testing::AttentionKernelTest {};

TEST_P(AttentionKernel, RowsAreRight) {
  for (const KernelProblem& problem : many_rows()) problem.expect_right();
}

TEST_P(AttentionKernel, RowsThatSeeNothing) {
  // In front of the keys, and so far behind them that the window misses them.
  filled({.tokens = 3, .kv_len = 40, .first_position = -5}).expect_right();
  filled({.tokens = 2, .kv_len = 40, .first_position = 60, .left = 5}).expect_right();
}

TEST_P(AttentionKernel, RowsDoNotDependOnTheirNeighbours) {
  // In place, AMX takes a few rows by vectors and more by tiles.
  if (KernelProblem::loops == Loops::in_place &&
      (active_isa() == Isa::amx || active_isa() == Isa::amx_twin)) {
    return;
  }
  for (const KernelProblem& problem : many_rows()) {
    const KernelResult whole = problem.run();
    const std::vector<int> sizes = {1, 8, 20, 29};
    for (size_t start : {0, 2}) {
      KernelResult pieces = problem.empty_result();
      size_t piece = start;
      for (int first = 0, n = 0; first < problem.tokens; first += n) {
        n = std::min(sizes[piece++ % sizes.size()], problem.tokens - first);
        EXPECT_TRUE(problem.run(pieces, first, n, 0, 1));
        EXPECT_TRUE(problem.run(pieces, first, n, 1, 2));
      }
      EXPECT_TRUE(pieces == whole) << "from a piece of " << sizes[start];
    }
  }
}

TEST_P(AttentionKernel, EveryHeadDimension) {
  for (int dim = 16; dim <= 576; dim += 16) {
    filled({.tokens = 2,
            .group = 2,
            .dim = dim,
            .v_dim = 592 - dim,
            .kv_len = 37,
            .first_position = 35,
            .scale = 1 / std::sqrt(static_cast<float>(dim))})
        .expect_right();
  }
}

TEST_P(AttentionKernel, ARopePartIsTheLastDimensions) {
  for (int dim : {32, 48, 96, 192, 576}) {
    const KernelProblem problem = filled(
        {.tokens = 3, .group = 5, .dim = dim, .kv_len = 70, .first_position = 67, .scale = 0.1F}
    );
    const KernelResult whole = problem.run();
    for (int rope : {16, dim / 32 * 16, dim - 16}) {
      const KernelResult parted = problem.run(rope);
      // A product may take 32 dimensions at once, if they are stored together.
      if (KernelProblem::loops == Loops::in_place && (dim - rope) % 32 != 0) {
        for (std::size_t i = 0; i < whole.lse.size(); ++i) {
          EXPECT_NEAR(parted.lse[i], whole.lse[i], 1e-5) << rope;
        }
      } else {
        EXPECT_TRUE(parted == whole) << rope;
      }
    }
  }
}

TEST_P(AttentionKernel, MergedPartsHaveTheLargestLogitOfAllAndTheExactSum) {
  constexpr int kDim = 16;
  // Two parts of one row: outputs, and then reference, sum, largest score and what turns
  // the sum into that of exact exponentials.
  std::vector<float> parts(2 * (kDim + kPartialStateFloats), 1.0F);
  const float states[2][kPartialStateFloats] = {{3, 1, 5, 0.75}, {2, 1, 7, 1.5}};
  for (int i = 0; i < 2; ++i) {
    std::copy_n(
        states[i], kPartialStateFloats, parts.begin() + i * (kDim + kPartialStateFloats) + kDim
    );
  }
  uint16_t out[kDim];
  float max_logit = 0;
  float lse = 0;
  const kernels::AttentionTile tile = {
      .v_head_dim = kDim,
      .num_tokens = 1,
      .group = 1,
      .scale = 0.5F,
      .results = {.out = {out}, .lse = {&lse}, .max_logits = &max_logit},
  };
  active_kernels().attention[kernels::kBfloat16].merge(&tile, parts.data(), 2);
  EXPECT_EQ(max_logit, 3.5F);
  EXPECT_NEAR(lse, std::log(8 * 0.75 + 4 * 1.5), 1e-6);
  EXPECT_EQ(to_float(out[0]), 1.0F);
}

INSTANTIATE_TEST_SUITE_P(Isa, AttentionKernel, testing::all_kernels(), testing::kernel_test_name);

}  // namespace
}  // namespace cpattn
