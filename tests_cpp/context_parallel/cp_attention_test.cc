// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/cp_attention.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using testing::message_of;
using testing::random_floats;
using testing::view;

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 32, kRope = 16, kPageSize = 16, kPages = 12;

/// Three sequences with prefixes, and their caches, over any number of ranks.
class CpAttention : public ::testing::Test {
 protected:
  using Change = std::function<void(CpAttentionArguments&)>;

  CpAttention() : blocks_(kPages), mask_(40 * 60 + 3 * 50 + 17 * 17) {
    std::iota(blocks_.rbegin(), blocks_.rend(), 0);
    for (std::size_t i = 0; i < mask_.size(); ++i) mask_[i] = i % 7 != 0 && i % 60 > 4;
  }

  CpBatch batch(CpStrategy strategy, int64_t cp_size) const {
    return {
        .extend_lens = extend_lens_,
        .seq_lens = seq_lens_,
        .cp_size = cp_size,
        .strategy = strategy,
    };
  }

  CpAttentionArguments arguments() {
    return {
        .q = {},
        .k_cache = view(k_, DType::float32, {kPages, kPageSize, kKvHeads, kDim}),
        .v_cache = view(v_, DType::float32, {kPages, kPageSize, kKvHeads, kDim}),
        .block_tables = {.data = blocks_.data(), .rows = 3, .columns = 4, .row_stride = 4},
        .page_size = kPageSize,
        .num_heads = kHeads,
        .num_kv_heads = kKvHeads,
        .scale = 0.2,
        .out = {},
        .lse = std::nullopt,
    };
  }

  /// out and LSE of all tokens, in their order, put together from all ranks.
  std::vector<float> all_ranks(CpStrategy strategy, int64_t cp_size, const Change& change) {
    std::vector<float> result(60 * kHeads * (kDim + 1));
    for (const auto& rank : build_cp_metadata_all_ranks(batch(strategy, cp_size))) {
      const std::vector<int32_t> tokens = local_q_indices(rank);
      const auto rows = static_cast<int64_t>(tokens.size());
      std::vector<float> q = take(q_, tokens, kDim), q_rope = take(q_rope_, tokens, kRope);
      std::vector<float> out(rows * kHeads * kDim), lse(rows * kHeads);
      CpAttentionArguments given = arguments();
      change(given);
      const int64_t dim = given.v_head_dim.value_or(kDim);
      given.q = view(q, DType::float32, {rows, kHeads * kDim});
      if (given.k_rope) given.q_rope = view(q_rope, DType::float32, {rows, kHeads * kRope});
      given.out = view(out, DType::float32, {rows, kHeads * dim});
      given.lse = view(lse, DType::float32, {rows, kHeads});
      do_cp_attn_fia(rank, given);
      for (int64_t i = 0; i < rows; ++i) {
        float* to = result.data() + tokens[i] * kHeads * (kDim + 1);
        std::copy_n(out.data() + i * kHeads * dim, kHeads * dim, to);
        std::copy_n(lse.data() + i * kHeads, kHeads, to + kHeads * kDim);
      }
    }
    return result;
  }

  static std::vector<float> take(
      const std::vector<float>& all, const std::vector<int32_t>& tokens, int64_t dim
  ) {
    std::vector<float> rows;
    for (const int32_t token : tokens) {
      const auto begin = all.begin() + token * kHeads * dim;
      rows.insert(rows.end(), begin, begin + kHeads * dim);
    }
    return rows;
  }

  const std::vector<int64_t> extend_lens_ = {40, 3, 17}, seq_lens_ = {60, 50, 17};
  std::vector<float> q_ = random_floats(60 * kHeads * kDim, 1);
  std::vector<float> q_rope_ = random_floats(60 * kHeads * kRope, 2);
  std::vector<float> k_ = random_floats(kPages * kPageSize * kKvHeads * kDim, 3);
  std::vector<float> v_ = random_floats(kPages * kPageSize * kKvHeads * kDim, 4);
  std::vector<float> rope_ = random_floats(kPages * kPageSize * kKvHeads * kRope, 5);
  std::vector<float> sinks_ = random_floats(kHeads, 6);
  std::vector<int32_t> blocks_;
  std::vector<uint8_t> mask_;
};

TEST_F(CpAttention, EveryNumberOfRanksGivesTheBitsOfOne) {
  const std::vector<std::pair<std::string, Change>> changes = {
      {"causal", [](auto&) {}},
      {"window",
       [](auto& a) { a.visibility.window = KeyWindow{.left = 9, .right = std::nullopt}; }},
      {"not causal", [](auto& a) { a.visibility.causal = false; }},
      {"window on both sides",
       [](auto& a) {
         a.visibility.causal = false;
         a.visibility.window = KeyWindow{.left = 9, .right = 4};
       }},
      {"softcap and sinks",
       [&](auto& a) {
         a.softcap = 2;
         a.sinks = view(sinks_, DType::float32, {kHeads});
       }},
      {"mask",
       [&](auto& a) {
         a.visibility.causal = false;
         a.visibility.custom_mask = view(mask_, DType::bool8, {static_cast<int64_t>(mask_.size())});
       }},
      {"latents", [&](auto& a) {
         a.v_cache.reset();
         a.v_head_dim = 16;
         a.k_rope = view(rope_, DType::float32, {kPages, kPageSize, kKvHeads, kRope});
       }},
  };
  for (const auto& [name, change] : changes) {
    const std::vector<float> one = all_ranks(CpStrategy::contiguous, 1, change);
    for (const CpStrategy strategy :
         {CpStrategy::zigzag, CpStrategy::interleave, CpStrategy::contiguous}) {
      for (const int64_t cp_size : {2, 3, 8, 16}) {
        EXPECT_EQ(all_ranks(strategy, cp_size, change), one)
            << name << ", " << cp_strategy_name(strategy) << " over " << cp_size;
      }
    }
  }
}

TEST_F(CpAttention, SegmentsWithoutCausalEndWithTheirSequence) {
  for (const CpStrategy strategy :
       {CpStrategy::zigzag, CpStrategy::interleave, CpStrategy::contiguous}) {
    const ContextParallelMetadata rank = build_cp_metadata(batch(strategy, 3), 1);
    const std::vector<AttentionSegment> causal = cp_segments(rank);
    std::vector<AttentionSegment> all = cp_segments(rank, /*causal=*/false);
    ASSERT_EQ(all.size(), causal.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].kv_len, seq_lens_[all[i].table_row]);
      all[i].kv_len = causal[i].kv_len;
      EXPECT_EQ(all[i], causal[i]);
    }
  }
}

TEST_F(CpAttention, OptionsThatDoNotFitAreNamed) {
  const auto message = [&](const Change& change) {
    return message_of([&] { all_ranks(CpStrategy::zigzag, 2, change); });
  };
  EXPECT_EQ(message([](auto&) {}), "no error");
  EXPECT_EQ(
      message([](auto& a) { a.visibility.window = KeyWindow{.left = -1, .right = 0}; }),
      "do_cp_attn_fia: window must be >= 0 (0: a token sees itself), got -1"
  );
  EXPECT_EQ(
      message([&](auto& a) { a.visibility.custom_mask = view(mask_, DType::bool8, {40}); }),
      "do_cp_attn_fia: custom_mask must have sum(q_len * kv_len) = 2400 or more elements, got 40"
  );
  EXPECT_EQ(
      message([&](auto& a) { a.visibility.packed_custom_mask = view(mask_, DType::uint8, {400}); }),
      "do_cp_attn_fia: packed_custom_mask must have sum(ceil(q_len * kv_len / 8)) = 356 bytes, "
      "got 400"
  );
  EXPECT_EQ(
      message([](auto& a) { a.v_cache.reset(); }),
      "do_cp_attn_fia: v_head_dim must be given without v_cache: values are the first v_head_dim "
      "dimensions of the keys"
  );
  EXPECT_EQ(
      message([](auto& a) {
        a.v_cache.reset();
        a.v_head_dim = 48;
      }),
      "do_cp_attn_fia: v_head_dim must be at most the 32 dimensions of k_cache, got 48"
  );
  EXPECT_EQ(
      message([&](auto& a) {
        a.k_rope = view(k_, DType::float32, {kPages, kPageSize, kKvHeads, kDim});
      }),
      "do_cp_attn_fia: k_rope must have the 16 dimensions of q_rope, got 32"
  );
}

}  // namespace
}  // namespace cpattn
