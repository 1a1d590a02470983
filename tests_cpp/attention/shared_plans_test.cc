// SPDX-License-Identifier: Apache-2.0
// Plans and metadata are values: any number of threads may use one at the same time. Under
// ThreadSanitizer a write to one that nobody is told of ends these tests.
#include <gtest/gtest.h>

#include <latch>
#include <numeric>
#include <thread>
#include <tuple>
#include <vector>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/attention/sequence_batch.h"
#include "cpattn/context_parallel/cp_attention.h"
#include "cpattn/sparse/cp_indexer.h"
#include "cpattn/sparse/dsa_metadata.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

constexpr int kThreads = 8, kRepeats = 5;
constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 32, kPageSize = 16, kPages = 12, kTopk = 7;

/// What `call` returns on one thread, it returns on each of eight.
template <class Call>
void expect_same_on_all_threads(Call call) {
  const auto expected = call();
  std::vector<int> same(kThreads);
  std::latch start(kThreads);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      for (int repeat = 0; repeat < kRepeats; ++repeat) same[i] += call() == expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(same, std::vector<int>(kThreads, kRepeats));
}

/// Three sequences, one with a long prefix, in pages in descending order.
class SharedPlans : public ::testing::Test {
 protected:
  SharedPlans() : blocks_(kPages) { std::iota(blocks_.rbegin(), blocks_.rend(), 0); }

  IndexTable tables() const {
    return {.data = blocks_.data(), .rows = 3, .columns = 4, .row_stride = 4};
  }

  TensorView cache() { return view(cache_, DType::float32, {kPages, kPageSize, kKvHeads, kDim}); }

  const std::vector<int64_t> extend_lens_ = {40, 3, 17}, seq_lens_ = {60, 50, 17};
  std::vector<float> q_ = random_floats(60 * kHeads * kDim, 1);
  std::vector<float> cache_ = random_floats(kPages * kPageSize * kKvHeads * kDim, 2);
  std::vector<float> weights_ = random_floats(60 * kHeads, 3);
  std::vector<int32_t> blocks_;
};

TEST_F(SharedPlans, AttentionPlan) {
  SequenceBatch batch{
      .shape = {kHeads, kKvHeads, kDim, kDim},
      .q_lens = extend_lens_,
      .kv_lens = seq_lens_,
      .block_tables = tables(),
      .page_size = kPageSize,
      .num_pages = kPages,
  };
  for (const int num_threads : {1, 2, 0}) {
    const AttentionPlan plan = plan_sequences("test", batch, num_threads);
    expect_same_on_all_threads([&] {
      std::vector<float> out(60 * kHeads * kDim), lse(60 * kHeads);
      run_attention(
          plan, {.q = view(q_, DType::float32, {60, kHeads, kDim}),
                 .k = paged_cache("test", "k", cache(), KVAxisOrder::nhd, std::nullopt),
                 .v = paged_cache("test", "v", cache(), KVAxisOrder::nhd, std::nullopt),
                 .out = view(out, DType::float32, {60, kHeads, kDim}),
                 .lse = view(lse, DType::float32, {60, kHeads})}
      );
      return std::pair(out, lse);
    });
  }
}

TEST_F(SharedPlans, ContextParallelMetadata) {
  for (const CpStrategy strategy :
       {CpStrategy::zigzag, CpStrategy::interleave, CpStrategy::contiguous}) {
    const CpBatch batch{
        .extend_lens = extend_lens_, .seq_lens = seq_lens_, .cp_size = 2, .strategy = strategy
    };
    // Both ranks lie in one allocation, as do copies.
    const std::vector<ContextParallelMetadata> ranks = build_cp_metadata_all_ranks(batch);
    const ContextParallelMetadata& metadata = ranks[1];
    const int64_t rows = metadata.num_local_rows();
    expect_same_on_all_threads([&] {
      std::vector<float> out(rows * kHeads * kDim);
      const ContextParallelMetadata copy = pad_to_physical(metadata);
      do_cp_attn_fia(
          metadata, {.q = view(q_, DType::float32, {rows, kHeads * kDim}),
                     .k_cache = cache(),
                     .v_cache = cache(),
                     .block_tables = tables(),
                     .page_size = kPageSize,
                     .num_heads = kHeads,
                     .num_kv_heads = kKvHeads,
                     .out = view(out, DType::float32, {rows, kHeads * kDim})}
      );
      return std::tuple(
          out, copy, local_q_indices(metadata), query_cache_lengths(copy),
          gathered_row_indices(ranks[0])
      );
    });
    expect_same_on_all_threads([&] {
      std::vector<int32_t> indices(rows * kTopk);
      cp_indexer_topk(
          metadata, {.q = view(q_, DType::float32, {rows, kHeads, kDim}),
                     .weights = view(weights_, DType::float32, {rows, kHeads}),
                     .index_k_cache = view(cache_, DType::float32, {kPages, kPageSize, kDim}),
                     .block_tables = tables(),
                     .page_size = kPageSize,
                     .topk = kTopk,
                     .indices = view(indices, DType::int32, {rows, kTopk})}
      );
      return indices;
    });
  }
}

TEST_F(SharedPlans, DsaMetadata) {
  const CpBatch batch{
      .extend_lens = extend_lens_,
      .seq_lens = seq_lens_,
      .cp_size = 2,
      .strategy = CpStrategy::interleave
  };
  const ContextParallelMetadata cp = build_cp_metadata(batch, 1);
  const auto build = [&] {
    return build_dsa_metadata(
        {.seq_lens = seq_lens_,
         .extend_lens = extend_lens_,
         .topk = kTopk,
         .fp8_kv_cache = true,
         .prefill_impl = "flashmla_sparse",
         .cp = &cp}
    );
  };
  expect_same_on_all_threads(build);  // of one metadata of context parallelism
  const DsaMetadata metadata = build();
  const auto rows = static_cast<int64_t>(metadata.ks.size());
  expect_same_on_all_threads([&] {
    const std::vector<int64_t> begins(metadata.ks.begin(), metadata.ks.end());
    const std::vector<int64_t> ends(metadata.ke.begin(), metadata.ke.end());
    std::vector<int32_t> indices(rows * kTopk);
    const PageTable pages{.indptr = {0, 1}, .page_ids = {0}};
    const TensorView keys = view(cache_, DType::float32, {kPages * kPageSize * kKvHeads, kDim});
    const auto ranges = flat_indexer_rows("test", begins, ends, rows, keys.shape[0]);
    indexer_topk(
        {.function = "test",
         .q = view(q_, DType::float32, {rows, kHeads, kDim}),
         .weights = view(weights_, DType::float32, {rows, kHeads}),
         .keys = flat_index_keys("test", keys, std::nullopt),
         .pages = pages,
         .rows = ranges},
        {.topk = kTopk, .indices = view(indices, DType::int32, {rows, kTopk})}
    );
    return std::pair(indices, metadata);
  });
}

}  // namespace
}  // namespace cpattn
