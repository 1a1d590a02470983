// SPDX-License-Identifier: Apache-2.0
// The bfloat16 kernels themselves, on every instruction set: what only they can
// get wrong, whichever way ops divides the work.
#include "kernels/attention/attention_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

std::vector<uint16_t> to_bfloat16(const std::vector<float>& values) {
  std::vector<uint16_t> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](float x) {
    return to_bfloat16(x);
  });
  return result;
}

struct Result {
  std::vector<uint16_t> out;  // [tokens][group][v_dim]
  std::vector<float> lse;     // [tokens][group]
  std::vector<float> max_logits;
  bool operator==(const Result&) const = default;
};

/// What a kernel said it was doing: scope and flops.
using Marks = std::vector<std::pair<int32_t, int64_t>>;

void append_mark(void* marks, int32_t scope, int64_t flops) {
  static_cast<Marks*>(marks)->emplace_back(scope, flops);
}

/// One sequence of keys for one KV head, on pages of 16 in descending order, and
/// queries [tokens][group][dim] for it.
struct Problem {
  static inline bool in_place;                   // by decode() instead of run()
  static inline std::function<void()> at_polls;  // what else this thread does then
  int tokens = 1, group = 1, dim = 32, v_dim = 32;
  int64_t kv_len = 1;
  int64_t first_position = 0, position_step = 1;
  int64_t left = kernels::kUnlimited, right = 0;
  float scale = 0.25F, softcap = 0;
  int blocks = 1 << 30;           // after which to stop
  Marks* marks = nullptr;         // filled by run(), unless null
  std::vector<uint8_t> mask;      // empty, or [tokens][kv_len / 32 + 1][4]
  std::vector<uint16_t> q, k, v;  // k and v as [key][dim]

  void fill() {
    q = to_bfloat16(random_floats(int64_t{tokens} * group * dim, 1));
    k = to_bfloat16(random_floats(kv_len * dim, 2));
    v = to_bfloat16(random_floats(kv_len * v_dim, 3));
  }

  int64_t mask_stride() const { return (kv_len / 32 + 1) * 4; }

  bool sees(int token, int64_t key) const {
    const int64_t position = first_position + token * position_step;
    if (key < position - left || key > position + right) return false;
    return mask.empty() || (mask[token * mask_stride() + key / 8] >> key % 8 & 1) != 0;
  }

  /// Runs tokens [first_token, first_token + n) and heads [first_head,
  /// first_head + heads); writes into `result`, unless it was stopped: false. The last `rope`
  /// dimensions of q and k go in as a rope part.
  bool run(Result& result, int first_token, int n, int first_head, int heads, int rope = 0) const {
    constexpr int64_t kPage = 16;
    const int64_t num_pages = (kv_len + kPage - 1) / kPage;
    std::vector<int32_t> pages(num_pages);
    for (int64_t i = 0; i < num_pages; ++i) pages[i] = static_cast<int32_t>(num_pages - 1 - i);
    const auto paged = [&](const std::vector<uint16_t>& rows, int columns) {
      std::vector<uint16_t> cache(num_pages * kPage * columns, to_bfloat16(kInfinity));
      for (int64_t key = 0; key < kv_len; ++key) {
        std::copy_n(
            rows.begin() + key * columns, columns,
            cache.begin() + (pages[key / kPage] * kPage + key % kPage) * columns
        );
      }
      return cache;
    };
    const std::vector<uint16_t> k_cache = paged(k, dim);
    const std::vector<uint16_t> v_cache = paged(v, v_dim);
    const int64_t row = int64_t{first_token} * group + first_head;
    const uint16_t* queries = q.data() + row * dim;
    int polls_left = blocks;
    const kernels::AttentionTile tile = {
        .q = queries,
        .q_rope = rope > 0 ? queries + dim - rope : nullptr,
        .q_token_stride = int64_t{group} * dim,
        .q_head_stride = dim,
        .q_rope_token_stride = int64_t{group} * dim,
        .q_rope_head_stride = dim,
        .k = {k_cache.data(), kPage * dim, dim},
        .k_rope = {k_cache.data() + dim - rope, kPage * dim, dim},
        .v = {v_cache.data(), kPage * v_dim, v_dim},
        .pages = pages.data(),
        .page_size = kPage,
        .head_dim = dim - rope,
        .rope_dim = rope,
        .v_head_dim = v_dim,
        .num_tokens = n,
        .group = heads,
        .kv_len = kv_len,
        .first_position = first_position + first_token * position_step,
        .position_step = position_step,
        .left = left,
        .right = right,
        .mask = mask.empty() ? nullptr : mask.data() + first_token * mask_stride(),
        .mask_stride = mask_stride(),
        .scale = scale,
        .softcap = softcap,
        .out = result.out.data() + row * v_dim,
        .out_token_stride = int64_t{group} * v_dim,
        .out_head_stride = v_dim,
        .lse = result.lse.data() + row,
        .lse_token_stride = group,
        .lse_head_stride = 1,
        .max_logits = result.max_logits.data() + row,
        .should_stop =
            [](void* polls) {
              if (const auto nested = std::exchange(at_polls, nullptr)) {
                nested();
                at_polls = nested;
              }
              return --*static_cast<int*>(polls) < 0;
            },
        .stop_context = &polls_left,
        .mark = marks == nullptr ? nullptr : &append_mark,
        .mark_context = marks,
    };
    const kernels::AttentionKernel& kernel = active_kernels().attention[kernels::kBfloat16];
    const auto scratch_bytes = in_place ? kernel.decode_scratch_bytes : kernel.scratch_bytes;
    const int64_t bytes = scratch_bytes(int64_t{n} * heads, dim, v_dim);
    // Kernels get scratch as other work left it: NaN everywhere.
    std::vector<float> scratch(bytes / 4 + 32, kNan);
    const auto address = reinterpret_cast<uintptr_t>(scratch.data());
    return (in_place ? kernel.decode : kernel.run)(
        &tile, scratch.data() + (64 - address % 64) % 64 / 4
    );
  }

  Result empty_result() const {
    return {
        std::vector<uint16_t>(int64_t{tokens} * group * v_dim, 0x1234),
        std::vector<float>(int64_t{tokens} * group, 77.0F),
        std::vector<float>(int64_t{tokens} * group, 77.0F)
    };
  }

  Result run(int rope = 0) const {
    Result result = empty_result();
    EXPECT_TRUE(run(result, 0, tokens, 0, group, rope));
    return result;
  }

  /// A row in float64.
  struct Expected {
    std::vector<double> out;
    std::vector<double> allowed;  // errors of it
    double lse = 0;
    double max_logit = 0;
  };

  Expected expected(int token, int head) const {
    constexpr double kNothing = -std::numeric_limits<double>::infinity();
    std::vector<double> scores(kv_len, kNothing);
    double maximum = kNothing;
    for (int64_t key = 0; key < kv_len; ++key) {
      if (!sees(token, key)) continue;
      double score = 0;
      for (int d = 0; d < dim; ++d) {
        score += double{to_float(q[(token * group + head) * dim + d])} * to_float(k[key * dim + d]);
      }
      scores[key] = score * scale;
      if (softcap > 0) scores[key] = softcap * std::tanh(scores[key] / softcap);
      maximum = std::max(maximum, scores[key]);
    }
    double sum = 0;
    std::vector<double> out(v_dim, 0.0), magnitude(v_dim, 0.0), squares(v_dim, 0.0);
    for (int64_t key = 0; key < kv_len; ++key) {
      if (!std::isfinite(scores[key])) continue;
      const double p = std::exp(scores[key] - maximum);
      sum += p;
      for (int d = 0; d < v_dim; ++d) {
        const double product = p * to_float(v[key * v_dim + d]);
        out[d] += product;
        magnitude[d] += std::fabs(product);
        squares[d] += product * product;
      }
    }
    std::vector<double> allowed(v_dim, 0.0);
    for (int d = 0; d < v_dim && sum > 0; ++d) {
      out[d] /= sum;
      allowed[d] = allowed_error(out[d], magnitude[d] / sum, std::sqrt(squares[d]) / sum);
    }
    return {out, allowed, maximum + std::log(sum), maximum};
  }

  /// The result is rounded to bfloat16, by half a unit. Weights may be, independently of each
  /// other: six deviations of half a unit of their products with the values. What is done in
  /// float32, exponentials to 3e-6 among it, is a share of the absolute values.
  static double allowed_error(double out, double magnitude, double spread) {
    constexpr double kUnit = 0x1p-7;
    return kUnit / 2 * std::fabs(out) + 6 / std::sqrt(12.0) * kUnit * spread + 6e-6 * magnitude;
  }

  void expect_right() const {
    const Result result = run();
    for (int row = 0; row < tokens * group; ++row) {
      const Expected wanted = expected(row / group, row % group);
      for (int d = 0; d < v_dim; ++d) {
        ASSERT_NEAR(to_float(result.out[row * v_dim + d]), wanted.out[d], wanted.allowed[d])
            << row << ' ' << d;
      }
      if (std::isinf(wanted.lse)) {
        ASSERT_EQ(result.lse[row], -kInfinity);
        ASSERT_EQ(result.max_logits[row], -kInfinity);
      } else {
        const double allowed = 3e-6 * (1 + std::fabs(wanted.lse));
        ASSERT_NEAR(result.max_logits[row], wanted.max_logit, allowed) << row;
        ASSERT_NEAR(result.lse[row], wanted.lse, allowed) << row;
      }
    }
  }
};

class AttentionKernel : public ::testing::TestWithParam<std::tuple<Isa, bool>> {
 protected:
  void SetUp() override {
    set_isa(isa_name(std::get<0>(GetParam())));
    Problem::in_place = std::get<1>(GetParam());
  }
  void TearDown() override { set_isa(isa_name(before_)); }

  static Problem filled(Problem problem) {
    problem.fill();
    return problem;
  }
  static void randomize_mask(Problem& problem) {
    for (float x : random_floats(problem.tokens * problem.mask_stride(), 4)) {
      problem.mask.push_back(static_cast<uint8_t>(static_cast<int>(x * 1000)));
    }
  }
  /// Many rows against more than two blocks: plain, through a window, behind
  /// strides of the position, masked, capped.
  static std::vector<Problem> many_rows() {
    const Problem plain = {.tokens = 67, .group = 3, .kv_len = 1400, .first_position = 1330};
    std::vector<Problem> problems(6, plain);
    problems[1].left = 40;
    problems[2].first_position = -20;
    problems[2].position_step = 19;
    problems[3].softcap = 2;
    problems[4].right = kernels::kUnlimited;
    for (Problem& problem : problems) problem.fill();
    randomize_mask(problems[5]);
    return problems;
  }

 private:
  Isa before_ = active_isa();
};

TEST_P(AttentionKernel, RowsAreRight) {
  for (const Problem& problem : many_rows()) problem.expect_right();
}

TEST_P(AttentionKernel, RowsThatSeeNothing) {
  // In front of the keys, and so far behind them that the window misses them.
  filled({.tokens = 3, .kv_len = 40, .first_position = -5}).expect_right();
  filled({.tokens = 2, .kv_len = 40, .first_position = 60, .left = 5}).expect_right();
}

TEST_P(AttentionKernel, RowsDoNotDependOnTheirNeighbours) {
  for (const Problem& problem : many_rows()) {
    const Result whole = problem.run();
    const std::vector<int> sizes = {1, 8, 20, 29};
    for (size_t start = 0; start < sizes.size(); ++start) {
      Result pieces = problem.empty_result();
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

TEST_P(AttentionKernel, StopsBetweenBlocks) {
  Problem problem = many_rows()[0];
  Result result = problem.empty_result();
  problem.blocks = 1;
  EXPECT_FALSE(problem.run(result, 0, problem.tokens, 0, problem.group));
  EXPECT_TRUE(result == problem.empty_result());
}

TEST_P(AttentionKernel, SaysWhatItIsDoingAndHowMuch) {
  // Every row sees every key, and both fill whole tiles and granules: no flop is for nothing.
  Problem problem = filled(
      {.tokens = 40, .group = 2, .dim = 48, .v_dim = 32, .kv_len = 512, .right = 512, .scale = 0.1F}
  );
  const Result silent = problem.run();
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

TEST_P(AttentionKernel, SkipsKeysThatTheMaskHidesFromAll) {
  Problem problem = filled({.tokens = 40, .group = 2, .kv_len = 1500, .right = 1500});
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
    const Problem problem = filled(
        {.tokens = 3, .group = 5, .dim = dim, .kv_len = 70, .first_position = 67, .scale = 0.1F}
    );
    const Result whole = problem.run();
    for (int rope : {16, dim / 32 * 16, dim - 16}) {
      const Result parted = problem.run(rope);
      // A product may take 32 dimensions at once, if they are stored together.
      if (Problem::in_place && (dim - rope) % 32 != 0) {
        for (std::size_t i = 0; i < whole.lse.size(); ++i) {
          EXPECT_NEAR(parted.lse[i], whole.lse[i], 1e-5) << rope;
        }
      } else {
        EXPECT_TRUE(parted == whole) << rope;
      }
    }
  }
}

TEST_P(AttentionKernel, ScoresMayOutgrowEarlierOnes) {
  // Query 1, key g: in base 2 the score is g. Around the factor 2^8 that keeps a
  // reference, beyond what an exponent holds, in the chunk, the block and the
  // sequence that they fall into first; behind few keys and behind many.
  constexpr float kLn2 = 0.693147181F;
  for (float growth :
       {1.0F, 7.0F, 7.9375F, 8.0F, 8.0625F, 9.0F, 15.0F, 16.0F, 127.0F, 128.0F, 250.0F, 300.0F,
        1e4F, 1e9F, 1e30F}) {
    for (int64_t from : {1, 31, 32, 200, 256, 299}) {
      Problem problem = filled({.dim = 16, .kv_len = 310, .first_position = 309, .scale = kLn2});
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

TEST_P(AttentionKernel, HugeScoresAreCoarserThanTheirWeights) {
  // In base 2 an ulp of the largest score is up to 1 and 64. Keys that
  // share the score share the weight.
  for (float huge : {1e7F, 1e9F}) {
    for (float scale : {0.1F, 0.3F, 0.7F}) {
      Problem problem = filled({.dim = 16, .kv_len = 310, .first_position = 309, .scale = scale});
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

TEST_P(AttentionKernel, OtherKernelsMayRunInItsPolls) {
  const Problem outer =
      filled({.tokens = 70, .group = 2, .dim = 64, .kv_len = 2500, .first_position = 2430});
  const Problem inner = filled({.tokens = 9, .dim = 48, .kv_len = 700, .first_position = 691});
  const Result clean = outer.run();
  const Result clean_inner = inner.run();
  int nested = 0;
  Problem::at_polls = [&] {
    ++nested;
    EXPECT_TRUE(inner.run() == clean_inner);
  };
  const Result result = outer.run();
  Problem::at_polls = nullptr;
  EXPECT_TRUE(result == clean);
  EXPECT_GT(nested, 1);
}

TEST_P(AttentionKernel, MinusInfinityHasNoWeight) {
  Problem problem = filled({.dim = 16, .kv_len = 300, .first_position = 299});
  std::fill(problem.q.begin(), problem.q.end(), to_bfloat16(1.0F));
  for (int64_t key = 0; key < 290; ++key) problem.k[key * 16] = to_bfloat16(-kInfinity);
  const Result result = problem.run();
  for (int64_t key = 0; key < 290; ++key) problem.v[key * 32] = to_bfloat16(1e30F);
  EXPECT_TRUE(problem.run() == result);
  for (int64_t key = 290; key < 300; ++key) problem.k[key * 16] = to_bfloat16(-kInfinity);
  const Result nothing = problem.run();
  EXPECT_EQ(nothing.lse[0], -kInfinity);
  EXPECT_EQ(nothing.out, std::vector<uint16_t>(32, 0));
}

TEST_P(AttentionKernel, NonFiniteKeysShowWhereTheyAreSeenOnly) {
  for (float poison : {kNan, -kNan, kInfinity}) {
    Problem problem = many_rows()[0];
    const Result clean = problem.run();
    const int token = 40;
    const int64_t key = problem.first_position + token;
    for (int d = 0; d < problem.dim; ++d) problem.k[key * problem.dim + d] = to_bfloat16(poison);
    const Result result = problem.run();
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

TEST_P(AttentionKernel, NonFiniteValuesShowWhereTheyAreSeenOnly) {
  for (float poison : {kNan, kInfinity, -kInfinity}) {
    Problem problem = many_rows()[0];
    const Result clean = problem.run();
    const int token = poison > 0 ? 41 : 40;  // either key of a pair
    const int poisoned = 5;                  // one dimension of the value of one key
    problem.v[(problem.first_position + token) * problem.v_dim + poisoned] = to_bfloat16(poison);
    const Result result = problem.run();
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

TEST_P(AttentionKernel, MergedPartsHaveTheLargestLogitOfAllAndTheExactSum) {
  constexpr int kDim = 16;
  // Two parts of one row: outputs, and then reference, sum, largest score and what turns
  // the sum into that of exact exponentials.
  std::vector<float> parts(2 * (kDim + kernels::kPartialState), 1.0F);
  const float states[2][kernels::kPartialState] = {{3, 1, 5, 0.75}, {2, 1, 7, 1.5}};
  for (int i = 0; i < 2; ++i) {
    std::copy_n(
        states[i], kernels::kPartialState,
        parts.begin() + i * (kDim + kernels::kPartialState) + kDim
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
      .out = out,
      .lse = &lse,
      .max_logits = &max_logit,
  };
  active_kernels().attention[kernels::kBfloat16].merge(&tile, parts.data(), 2);
  EXPECT_EQ(max_logit, 3.5F);
  EXPECT_NEAR(lse, std::log(8 * 0.75 + 4 * 1.5), 1e-6);
  EXPECT_EQ(to_float(out[0]), 1.0F);
}

INSTANTIATE_TEST_SUITE_P(
    Isa,
    AttentionKernel,
    ::testing::Combine(::testing::ValuesIn(supported_isas()), ::testing::Bool()),
    [](const auto& param_info) {
      return testing::isa_test_name({std::get<0>(param_info.param), 0}) +
             (std::get<1>(param_info.param) ? "_in_place" : "_packed");
    }
);

}  // namespace
}  // namespace cpattn
