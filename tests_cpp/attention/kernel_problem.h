// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of bfloat16 for the attention kernels themselves, on every instruction set: what only
// they can get wrong, whichever way ops divides the work.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/boundary/attention_kernel.h"
#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn::testing {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float to_float(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline std::vector<uint16_t> to_bfloat16(const std::vector<float>& values) {
  std::vector<uint16_t> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](float x) {
    return to_bfloat16(x);
  });
  return result;
}

struct KernelResult {
  std::vector<uint16_t> out;  // [tokens][group][v_dim]
  std::vector<float> lse;     // [tokens][group]
  std::vector<float> max_logits;
  bool operator==(const KernelResult&) const = default;
};

/// What a kernel said it was doing: scope and flops.
using Marks = std::vector<std::pair<int32_t, int64_t>>;

inline void append_mark(void* marks, int32_t scope, int64_t flops) {
  static_cast<Marks*>(marks)->emplace_back(scope, flops);
}

/// The loops that kernels may take: they pack keys, read them in place, or pack them and do not
/// round weights to bfloat16.
enum class Loops { packed, in_place, precise };

/// One sequence of keys for one KV head, on pages of 16 in descending order, and
/// queries [tokens][group][dim] for it.
struct KernelProblem {
  static inline Loops loops;
  static inline std::function<void()> at_polls;  // what else this thread does then
  int tokens = 1, group = 1, dim = 32, v_dim = 32;
  int64_t kv_len = 1;
  int64_t first_position = 0, position_step = 1;
  int64_t left = kUnboundedKeys, right = 0;
  float scale = 0.25F, softcap = 0;
  int blocks = 1 << 30;           // after which to stop
  Marks* marks = nullptr;         // filled by run(), unless null
  std::vector<uint8_t> mask;      // empty, or [tokens][kv_len / 32 + 1][4]
  std::vector<int32_t> ranges;    // empty, or [tokens][2]: begin and end of the keys
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
    if (!ranges.empty() && (key < ranges[2 * token] || key >= ranges[2 * token + 1])) return false;
    return mask.empty() || (mask[token * mask_stride() + key / 8] >> key % 8 & 1) != 0;
  }

  /// Runs tokens [first_token, first_token + n) and heads [first_head,
  /// first_head + heads); writes into `result`, unless it was stopped: false. The last `rope`
  /// dimensions of q and k go in as a rope part.
  bool run(
      KernelResult& result, int first_token, int n, int first_head, int heads, int rope = 0
  ) const {
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
        .q = {queries, int64_t{group} * dim, dim},
        .q_rope = {rope > 0 ? queries + dim - rope : nullptr, int64_t{group} * dim, dim},
        .k = {k_cache.data(), kPage * dim, dim},
        .k_rope = {k_cache.data() + dim - rope, kPage * dim, dim},
        .v = {v_cache.data(), kPage * v_dim, v_dim},
        .pages = pages.data(),
        .page_size = kPage,
        .nope_dim = dim - rope,
        .rope_dim = rope,
        .v_head_dim = v_dim,
        .num_tokens = n,
        .group = heads,
        .may_read_in_place = loops == Loops::in_place,
        .precise = loops == Loops::precise,
        .seen =
            {.kv_len = kv_len,
             .first_position = first_position + first_token * position_step,
             .position_step = position_step,
             .left = left,
             .right = right,
             .key_ranges = ranges.empty() ? nullptr : ranges.data() + 2 * first_token,
             .mask = mask.empty() ? nullptr : mask.data() + first_token * mask_stride(),
             .mask_stride = mask_stride()},
        .scale = scale,
        .softcap = softcap,
        .results =
            {.out = {result.out.data() + row * v_dim, int64_t{group} * v_dim, v_dim},
             .lse = {result.lse.data() + row, group, 1},
             .max_logits = result.max_logits.data() + row},
        .hooks = {
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
            .mark_context = marks
        },
    };
    const kernels::AttentionKernel& kernel = active_kernels().attention[kernels::kBfloat16];
    const int64_t bytes = kernel.scratch_bytes(&tile);
    // Kernels get scratch as other work left it: NaN everywhere.
    std::vector<float> scratch(bytes / 4 + 32, kNan);
    const auto address = reinterpret_cast<uintptr_t>(scratch.data());
    return kernel.run(&tile, scratch.data() + (64 - address % 64) % 64 / 4);
  }

  KernelResult empty_result() const {
    return {
        std::vector<uint16_t>(int64_t{tokens} * group * v_dim, 0x1234),
        std::vector<float>(int64_t{tokens} * group, 77.0F),
        std::vector<float>(int64_t{tokens} * group, 77.0F)
    };
  }

  KernelResult run(int rope = 0) const {
    KernelResult result = empty_result();
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

  /// The result is rounded to bfloat16, by half a unit. Weights may be, or the second of their two
  /// parts, 2^-7 of them at most, independently of each other: six deviations of half a unit of
  /// their products with the values. What is done in float32, exponentials to 3e-6 among it, is a
  /// share of the absolute values.
  static double allowed_error(double out, double magnitude, double spread) {
    constexpr double kUnit = 0x1p-7;
    const double weights = loops == Loops::precise ? kUnit * 0x1p-7 : kUnit;
    return kUnit / 2 * std::fabs(out) + 6 / std::sqrt(12.0) * weights * spread + 6e-6 * magnitude;
  }

  void expect_right() const {
    const KernelResult result = run();
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

/// The kernels of every instruction set, with all of their loops.
using KernelParameters = std::tuple<Isa, Loops>;
class AttentionKernelTest : public ::testing::TestWithParam<KernelParameters> {
 protected:
  void SetUp() override {
    set_isa(isa_name(std::get<0>(GetParam())));
    KernelProblem::loops = std::get<1>(GetParam());
  }
  void TearDown() override { set_isa(isa_name(before_)); }

  static KernelProblem filled(KernelProblem problem) {
    problem.fill();
    return problem;
  }
  static void randomize_mask(KernelProblem& problem) {
    for (float x : random_floats(problem.tokens * problem.mask_stride(), 4)) {
      problem.mask.push_back(static_cast<uint8_t>(static_cast<int>(x * 1000)));
    }
  }
  /// Many rows against more than two blocks: plain, through a window, behind strides of the
  /// position, capped, with all keys, masked, and with ranges of pages, some of no key.
  static std::vector<KernelProblem> many_rows() {
    const KernelProblem plain = {.tokens = 67, .group = 3, .kv_len = 1400, .first_position = 1330};
    std::vector<KernelProblem> problems(7, plain);
    problems[1].left = 40;
    problems[2].first_position = -20;
    problems[2].position_step = 19;
    problems[3].softcap = 2;
    problems[4].right = kUnboundedKeys;
    problems[6].right = kUnboundedKeys;
    for (int token = 0; token < plain.tokens; ++token) {
      const int page = token / 6;
      problems[6].ranges.insert(problems[6].ranges.end(), {page * 90, page * 127});
    }
    for (KernelProblem& problem : problems) problem.fill();
    randomize_mask(problems[5]);
    return problems;
  }

 private:
  Isa before_ = active_isa();
};

inline auto all_kernels() {
  return ::testing::Combine(
      ::testing::ValuesIn(supported_isas()),
      ::testing::Values(Loops::packed, Loops::in_place, Loops::precise)
  );
}

inline std::string kernel_test_name(const ::testing::TestParamInfo<KernelParameters>& info) {
  constexpr const char* kNames[] = {"_packed", "_in_place", "_precise"};
  return isa_test_name({std::get<0>(info.param), 0}) +
         kNames[static_cast<int>(std::get<1>(info.param))];
}

}  // namespace cpattn::testing
