// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/context_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "testing.h"

namespace cpattn {
namespace {

using Lens = std::vector<int64_t>;
using Ints = std::vector<int32_t>;

constexpr CpStrategy kStrategies[] = {
    CpStrategy::zigzag, CpStrategy::interleave, CpStrategy::contiguous
};

Ints copy(std::span<const int32_t> values) { return {values.begin(), values.end()}; }

TEST(ContextParallel, TwoSequencesOneBehindAPrefix) {
  const Lens extend = {10, 14}, seq = {15, 14};
  const auto plan = build_cp_metadata({.extend_lens = extend, .seq_lens = seq, .cp_size = 2}, 1);
  EXPECT_EQ(split_list(plan), (Ints{3, 3, 2, 2, 4, 4, 3, 3}));
  EXPECT_EQ(cp_reverse_index(plan), (Ints{0, 4, 6, 2, 1, 5, 7, 3}));
  EXPECT_EQ(reverse_split_len(plan), (Ints{3, 4, 2, 3, 3, 4, 2, 3}));
  EXPECT_EQ(copy(plan.zigzag_index), (Ints{1, 5, 2, 6}));
  EXPECT_EQ(copy(plan.per_rank_actual_token), (Ints{12, 12}));
  EXPECT_EQ(copy(plan.prefix_lens), (Ints{5, 0}));
  EXPECT_EQ(copy(plan.kv_len_combined), (Ints{11, 8, 13, 11}));
  EXPECT_EQ(copy(plan.cu_seqlens_q_combined), (Ints{0, 3, 7, 9, 12}));
  EXPECT_EQ(copy(plan.cu_seqlens_q_next), (Ints{0, 2, 5}));
  EXPECT_EQ(plan.total_q_prev_tokens, 7);
  EXPECT_EQ(plan.total_q_next_tokens, 5);
  EXPECT_EQ(local_q_indices(plan), (Ints{3, 4, 5, 14, 15, 16, 17, 6, 7, 18, 19, 20}));
  EXPECT_EQ(query_request_indices(plan), (Ints{0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1}));
  EXPECT_EQ(query_cache_lengths(plan), (Ints{9, 10, 11, 5, 6, 7, 8, 12, 13, 9, 10, 11}));
}

TEST(ContextParallel, BareLengthsLackThePrefix) {
  const Lens extend = {10, 14}, seq = {15, 14};
  const auto plan = build_cp_metadata(
      {.extend_lens = extend,
       .seq_lens = seq,
       .cp_size = 2,
       .kv_len_convention = KvLenConvention::bare},
      1
  );
  EXPECT_EQ(copy(plan.kv_len_combined), (Ints{6, 8, 8, 11}));
  EXPECT_EQ(copy(plan.prefix_lens), (Ints{5, 0}));
  EXPECT_EQ(query_cache_lengths(plan)[0], 9);
}

TEST(ContextParallel, StrategiesWithoutAField) {
  const Lens extend = {10, 14};
  const auto interleave = build_cp_metadata(
      {.extend_lens = extend, .cp_size = 2, .strategy = CpStrategy::interleave}, 0
  );
  EXPECT_EQ(interleave.kv_len_prev.data(), nullptr);
  EXPECT_EQ(interleave.zigzag_index.data(), nullptr);
  EXPECT_EQ(copy(rows_per_request(interleave)), (Ints{5, 7}));
  EXPECT_THROW(split_list(interleave), std::invalid_argument);
  const auto contiguous = build_cp_metadata(
      {.extend_lens = extend, .cp_size = 2, .strategy = CpStrategy::contiguous}, 0
  );
  EXPECT_EQ(contiguous.kv_len_combined.data(), nullptr);
  EXPECT_EQ(contiguous.kv_len_next.size(), 0u);
  EXPECT_EQ(copy(contiguous.cu_seqlens_q_next), (Ints{0}));
  EXPECT_THROW(rows_per_request(contiguous), std::invalid_argument);
}

/// Every token is owned once, gathered_row_indices inverts the ranks' indices,
/// and the fields give each local row its visible keys.
void check_batch(const Lens& extend, const Lens& seq, int64_t cp_size, CpStrategy strategy) {
  const auto plans = build_cp_metadata_all_ranks(
      {.extend_lens = extend, .seq_lens = seq, .cp_size = cp_size, .strategy = strategy}
  );
  Ints gathered;
  for (const auto& plan : plans) {
    const Ints rows = local_q_indices(plan);
    ASSERT_EQ(static_cast<int32_t>(rows.size()), plan.num_local_rows());
    gathered.insert(gathered.end(), rows.begin(), rows.end());
    if (strategy != CpStrategy::interleave) {
      ASSERT_EQ(
          plan.total_q_prev_tokens + plan.total_q_next_tokens, static_cast<int32_t>(rows.size())
      );
    }
    Ints visible;
    const auto append = [&](auto q_lens, auto kv_lens) {
      for (std::size_t s = 0; s < q_lens.size(); ++s) {
        for (int32_t i = q_lens[s]; i-- > 0;) visible.push_back(kv_lens[s] - i);
      }
    };
    append(plan.actual_seq_q_prev, plan.kv_len_prev);
    append(plan.actual_seq_q_next, plan.kv_len_next);
    if (strategy != CpStrategy::interleave) {
      ASSERT_EQ(visible, query_cache_lengths(plan));
    }
    ASSERT_EQ(
        plan,
        build_cp_metadata(
            {.extend_lens = extend, .seq_lens = seq, .cp_size = cp_size, .strategy = strategy},
            plan.cp_rank
        )
    );
  }
  const Ints where = gathered_row_indices(plans[0]);
  ASSERT_EQ(where.size(), gathered.size());
  for (std::size_t token = 0; token < where.size(); ++token) {
    ASSERT_EQ(gathered[where[token]], static_cast<int32_t>(token));
  }
}

TEST(ContextParallel, EveryShortBatch) {
  for (const CpStrategy strategy : kStrategies) {
    for (const int64_t cp_size : {1, 2, 3, 5, 8}) {
      for (int64_t length = 0; length <= 4 * cp_size; ++length) {
        check_batch({length}, {length + 7}, cp_size, strategy);
        check_batch({3, length, 0, 1}, {3, length + 2, 9, 2}, cp_size, strategy);
      }
    }
  }
}

TEST(ContextParallel, PhysicalPaddingSharesTheArrays) {
  const Lens extend = {9};
  const auto plan = build_cp_metadata({.extend_lens = extend, .cp_size = 2}, 0);
  const auto padded = pad_to_physical(plan);
  EXPECT_EQ(copy(padded.per_rank_actual_token), (Ints{8, 8}));
  EXPECT_EQ(copy(padded.per_rank_logical_token), (Ints{5, 4}));
  EXPECT_EQ(padded.num_local_rows(), 5);
  EXPECT_EQ(padded.kv_len_prev.data(), plan.kv_len_prev.data());
  EXPECT_EQ(pad_to_physical(padded), padded);
  EXPECT_FALSE(padded == plan);
}

TEST(ContextParallel, CopiesKeepTheArrays) {
  ContextParallelMetadata kept;
  {
    const Lens extend(1000, 50);
    kept = build_cp_metadata_all_ranks({.extend_lens = extend, .cp_size = 5})[3];
  }
  EXPECT_EQ(
      std::accumulate(kept.actual_seq_q_combined.begin(), kept.actual_seq_q_combined.end(), 0),
      10000
  );
}

std::string message_of(const CpBatch& batch, int64_t cp_rank = 0) {
  try {
    build_cp_metadata(batch, cp_rank);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(ContextParallel, ErrorsNameArgumentRuleAndValue) {
  const Lens good = {3, 4}, negative = {3, -4}, longer = {3, 4, 5}, below = {3, 2};
  EXPECT_EQ(
      message_of({.extend_lens = negative}),
      "build_cp_metadata: extend_lens must be >= 0 and fit into int32, got -4 at index 1"
  );
  EXPECT_EQ(
      message_of({.extend_lens = good, .seq_lens = longer}),
      "build_cp_metadata: seq_lens must have as many elements as extend_lens, got 3 and 2"
  );
  EXPECT_EQ(
      message_of({.extend_lens = good, .seq_lens = below}),
      "build_cp_metadata: seq_lens must be >= extend_lens, got 2 below 4 at index 1"
  );
  EXPECT_EQ(
      message_of({.extend_lens = good, .num_tokens = 6}),
      "build_cp_metadata: num_tokens must be >= the sum of extend_lens, 7, got 6"
  );
  EXPECT_EQ(
      message_of({.extend_lens = good, .cp_size = 2}, 2),
      "build_cp_metadata: cp_rank must be in [0, 2), got 2"
  );
  EXPECT_EQ(message_of({.extend_lens = good, .seq_lens = below, .compat = true}), "no error");
}

TEST(ContextParallel, LengthsAreBoundedBeforeTheyAreAdded) {
  constexpr int64_t kHuge = INT64_MAX;
  const Lens huge = {1, kHuge}, ones = {1, 1}, negative = {INT64_MIN, 1};
  for (CpStrategy strategy : {CpStrategy::zigzag, CpStrategy::interleave, CpStrategy::contiguous}) {
    for (bool compat : {false, true}) {
      EXPECT_EQ(
          message_of(
              {.extend_lens = huge, .seq_lens = ones, .strategy = strategy, .compat = compat}
          ),
          "build_cp_metadata: extend_lens must be >= 0 and fit into int32, got "
          "9223372036854775807 at index 1"
      );
    }
    const ContextParallelMetadata metadata = build_cp_metadata(
        {.extend_lens = ones, .seq_lens = negative, .strategy = strategy, .compat = true}, 0
    );
    EXPECT_EQ(copy(metadata.prefix_lens), (Ints{0, 0}));
  }
}

TEST(ForwardMode, GatesBoundTheLengths) {
  const auto both = [](int64_t length, int64_t cp_size) {
    const Lens lens = {5, length};
    const auto mode = ForwardMode::extend;
    const std::string first =
        testing::message_of([&] { can_apply_cp(lens, cp_size, CpStrategy::zigzag, {}, mode); });
    const std::string second = testing::message_of([&] {
      can_dsa_prefill_cp_interleave(lens, cp_size, CpStrategy::interleave, mode);
    });
    EXPECT_EQ(first == "no error", second == "no error");
    return first;
  };
  EXPECT_EQ(both(0, 1), "no error");
  EXPECT_EQ(both(INT32_MAX, kMaxCpSize), "no error");
  EXPECT_EQ(
      both(-1, 2), "can_apply_cp: extend_lens must be >= 0 and fit into int32, got -1 at index 1"
  );
  EXPECT_NE(both(int64_t{INT32_MAX} + 1, 2), "no error");
  EXPECT_NE(both(5, 0), "no error");
  EXPECT_NE(both(5, kMaxCpSize + 1), "no error");
}

TEST(ForwardMode, GatesBoundTheSizeOfTheGroup) {
  const Lens extend = {1};
  for (int64_t cp_size : {int64_t{0}, kMaxCpSize + 1, int64_t{1} << 62}) {
    EXPECT_THROW(can_apply_cp(extend, cp_size, CpStrategy::zigzag, {}, {}), std::invalid_argument);
    EXPECT_THROW(
        can_dsa_prefill_cp_interleave(extend, cp_size, CpStrategy::interleave, ForwardMode::extend),
        std::invalid_argument
    );
  }
}

TEST(ForwardMode, SplittableModes) {
  static_assert(is_context_parallel_extend(ForwardMode::mixed));
  static_assert(!is_context_parallel_extend(ForwardMode::draft_extend_v2));
  static_assert(is_context_parallel_extend(ForwardMode::draft_extend_v2, true));
  const Lens extend = {8};
  EXPECT_TRUE(can_apply_cp(extend, 4, CpStrategy::zigzag, {}, {}));
  EXPECT_FALSE(can_apply_cp(extend, 5, CpStrategy::zigzag, {}, {}));
  EXPECT_FALSE(can_apply_cp(extend, 4, CpStrategy::interleave, {}, {}));
  EXPECT_FALSE(can_apply_cp(extend, 4, CpStrategy::zigzag, {}, ForwardMode::decode));
}

}  // namespace
}  // namespace cpattn
