// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/block_selection.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "cpattn/sparse/topk.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kForced = std::numeric_limits<float>::infinity();
/// Scores that make another thread worth waking.
constexpr int64_t kBlockScoresPerThread = int64_t{1} << 16;

/// A row of each of the two results, which is filled from the front.
class SelectedBlocks {
 public:
  SelectedBlocks(const TensorView& blocks, const TensorView& scores, int64_t row)
      : blocks_(blocks.as<int32_t>() + row * blocks.strides[0]),
        scores_(scores.as<float>() + row * scores.strides[0]),
        topk_(blocks.shape[1]) {}
  /// The row of blocks. A kernel may write indices into it, which add() then reads in order.
  int32_t* indices() const { return blocks_; }
  void add(int64_t block, float score) {
    if (!(score > kNone)) return;
    blocks_[count_] = static_cast<int32_t>(block);
    scores_[count_++] = score;
  }
  void end() {
    std::fill(blocks_ + count_, blocks_ + topk_, -1);
    std::fill(scores_ + count_, scores_ + topk_, kNone);
  }

 private:
  int32_t* blocks_;
  float* scores_;
  int64_t topk_;
  int64_t count_ = 0;
};

void check_results(
    const char* function,
    int64_t rows,
    int64_t topk,
    const TensorView& blocks,
    const TensorView& scores
) {
  check(
      topk >= 1 && topk <= kMaxTopk, function, ": topk must be in [1, ", kMaxTopk, "], got ", topk
  );
  check_dtype(function, "blocks", blocks.dtype, DType::int32);
  check_dtype(function, "block_scores", scores.dtype, DType::float32);
  check_rows(function, "blocks", blocks, {rows, topk});
  check_rows(function, "block_scores", scores, {rows, topk});
}

/// Checks all arguments, and returns how many of the rank's keys each query may see.
std::vector<int64_t> checked_lengths(const BlockSelection& given) {
  const char* function = given.function;
  check_dtype(function, "score", given.score.dtype, DType::float32);
  check_tensor(function, "score", given.score, 2);
  check(
      given.block_size >= 1 && given.block_size <= INT32_MAX, function,
      ": block_size must be in [1, ", INT32_MAX, "], got ", given.block_size
  );
  check(
      given.dcp_size >= 1 && given.dcp_size <= INT32_MAX, function, ": dcp_size must be in [1, ",
      INT32_MAX, "], got ", given.dcp_size
  );
  check(
      given.dcp_rank >= 0 && given.dcp_rank < given.dcp_size, function,
      ": dcp_rank must be in [0, ", given.dcp_size, "), got ", given.dcp_rank
  );
  check_results(function, given.score.shape[0], given.topk, given.blocks, given.block_scores);
  for (const auto& [name, count] :
       {std::pair{"init_blocks", given.init_blocks}, {"local_blocks", given.local_blocks}}) {
    check(
        count >= 0 && count <= given.topk, function, ": ", name, " must be in [0, topk], topk ",
        given.topk, ", got ", count
    );
  }
  check(
      given.init_blocks + given.local_blocks <= given.topk, function,
      ": init_blocks and local_blocks must be at most topk together, ", given.topk, ", got ",
      given.init_blocks, " and ", given.local_blocks
  );
  const int64_t rows = given.score.shape[0], columns = given.score.shape[1];
  check(
      static_cast<int64_t>(given.lengths.size()) == rows, function,
      ": lengths must have one element per row of score, ", rows, ", got ", given.lengths.size()
  );
  const int64_t round = given.dcp_size * given.block_size;
  std::vector<int64_t> local;
  for (const int64_t length : given.lengths) {
    check(
        length >= 0 && length <= INT32_MAX, function, ": lengths must be in [0, ", INT32_MAX,
        "], got ", length, " at index ", local.size()
    );
    const int64_t rest = length % round - given.dcp_rank * given.block_size;
    const int64_t own =
        length / round * given.block_size + std::clamp(rest, int64_t{0}, given.block_size);
    check(
        own <= columns, function, ": lengths must be of keys that score has, ", columns,
        " columns, got ", length, ", of which the rank has ", own, ", at index ", local.size()
    );
    local.push_back(own);
  }
  return local;
}

}  // namespace

void select_blocks(const BlockSelection& given) {
  const std::vector<int64_t> own_lengths = checked_lengths(given);
  const TraceSpan span(TraceScope::call, 0, DType::float32, given.function);
  const kernels::TopkKernel& kernel = active_sparse_kernels().topk;
  const int64_t rank = given.dcp_rank, ranks = given.dcp_size;
  const auto select = [&](int64_t row, StopToken&) {
    const auto blocks_of = [&](int64_t length) {
      return (length + given.block_size - 1) / given.block_size;
    };
    const int64_t num_blocks = blocks_of(given.lengths[row]), own = blocks_of(own_lengths[row]);
    // The kernel's scratch, which must be aligned to 64 bytes, is after the scores.
    const int64_t bytes = (own * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
    const auto topk = static_cast<int32_t>(given.topk);
    const int64_t more = own > given.topk ? kernel.scratch_bytes(topk) : 0;
    auto* scratch = static_cast<char*>(thread_scratch(given.function, bytes + more));
    auto* scores = reinterpret_cast<float*>(scratch);
    const float* keys = given.score.as<float>() + row * given.score.strides[0];
    kernel.block_maxima(keys, own_lengths[row], given.block_size, scores);
    // Own blocks below `first` are among the first of the sequence, blocks from `last` on among the
    // last.
    const auto own_below = [&](int64_t block) {
      return std::clamp((block - rank + ranks - 1) / ranks, int64_t{0}, own);
    };
    const int64_t first = own_below(given.init_blocks);
    const int64_t last = own_below(num_blocks - given.local_blocks);
    std::fill(scores, scores + first, kForced);
    std::fill(scores + last, scores + own, kForced);

    SelectedBlocks selected(given.blocks, given.block_scores, row);
    const auto add = [&](int64_t i) { selected.add(i * ranks + rank, scores[i]); };
    if (own <= given.topk) {
      for (int64_t i = 0; i < own; ++i) add(i);
    } else {
      const kernels::TopkRow best = {
          .scores = scores,
          .length = static_cast<int32_t>(own),
          .topk = topk,
          .sorted = false,
          .out = selected.indices(),
      };
      kernel.select(&best, scratch + bytes);
      for (int64_t i = 0; i < given.topk; ++i) add(selected.indices()[i]);
    }
    selected.end();
  };
  int64_t work = 0;
  for (const int64_t length : own_lengths) work += length;
  const int64_t threads =
      std::min<int64_t>(default_num_threads(), 1 + work / kBlockScoresPerThread);
  parallel_for(given.score.shape[0], static_cast<int>(threads), select);
}

void merge_blocks(const BlockMerge& given) {
  check_dtype(given.function, "block_scores", given.block_scores.dtype, DType::float32);
  const int64_t rows = given.blocks.rows, count = given.blocks.columns;
  check_rows(given.function, "block_scores", given.block_scores, {rows, count});
  check_results(given.function, rows, given.topk, given.out_blocks, given.out_scores);
  for (int64_t i = 0; i < rows * count; ++i) {
    const int64_t block = given.blocks.at(i / count, i % count);
    check(
        block <= INT32_MAX, given.function, ": blocks must be at most ", INT32_MAX, ", got ", block,
        " in row ", i / count
    );
  }

  struct Candidate {
    int32_t block;
    float score;
  };
  std::vector<Candidate> candidates;
  const auto by_block = [](const Candidate& a, const Candidate& b) {
    return a.block != b.block ? a.block < b.block : a.score > b.score;
  };
  const auto by_score = [](const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.block < b.block;
  };
  for (int64_t row = 0; row < rows; ++row) {
    const float* scores = given.block_scores.as<float>() + row * given.block_scores.strides[0];
    candidates.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = given.blocks.at(row, i);
      if (block < 0 || !(scores[i] > kNone)) continue;
      candidates.push_back({static_cast<int32_t>(block), scores[i]});
    }
    std::ranges::sort(candidates, by_block);
    const auto twice = std::ranges::unique(candidates, {}, &Candidate::block);
    candidates.erase(twice.begin(), twice.end());
    if (static_cast<int64_t>(candidates.size()) > given.topk) {
      std::ranges::nth_element(candidates, candidates.begin() + given.topk - 1, by_score);
      candidates.resize(given.topk);
      std::ranges::sort(candidates, by_block);
    }
    SelectedBlocks selected(given.out_blocks, given.out_scores, row);
    for (const Candidate& candidate : candidates) selected.add(candidate.block, candidate.score);
    selected.end();
  }
}

}  // namespace cpattn
