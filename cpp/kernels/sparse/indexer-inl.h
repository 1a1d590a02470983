// SPDX-License-Identifier: Apache-2.0
#pragma once

// The indexer: every query of a tile meets a block of keys that was packed once.
// Needs the vector layer and the engines included first.
#include "kernels/boundary/indexer_kernel.h"
#include "kernels/sparse/indexer_blocks-inl.h"
#include "kernels/sparse/indexer_scores-inl.h"
#include "kernels/sparse/indexer_topk-inl.h"

namespace cpattn::kernels {
namespace {

/// The loop over blocks of keys: every query is scored against the block that is packed.
template <class Scorer>
class IndexerLoop {
 public:
  static int64_t scratch_bytes(int32_t num_queries, int32_t num_heads, int32_t dim, int32_t topk) {
    return num_queries * Scorer::query_bytes(num_heads, dim) + IndexerBlocks<Scorer>::bytes(dim) +
           kIndexerRowBytes + QueryStreams::bytes(num_queries, topk);
  }

  static bool run(const IndexerTile* tile, void* scratch) {
    return IndexerLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  static constexpr int kBlocks = Scorer::kBlocks;

  IndexerLoop(const IndexerTile& tile, char* scratch)
      : tile_(tile),
        scorer_(tile),
        query_bytes_(Scorer::query_bytes(tile.num_heads, tile.dim)),
        queries_(scratch),
        scores_(reinterpret_cast<float*>(queries_ + tile.num_queries * query_bytes_)),
        blocks_(tile, reinterpret_cast<char*>(scores_) + kIndexerRowBytes),
        streams_(tile, blocks_.end()) {}

  bool run() {
    for (int i = 0; i < tile_.num_queries; ++i) {
      scorer_.pack_query(tile_.queries[i], query(i));
    }
    KeyRange all = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) {
      all = widened(all, scored_keys(tile_, tile_.queries[i]));
    }
    if (all.begin < all.end && !score(all)) return false;
    for (int i = 0; i < tile_.num_queries; ++i) write_indices(i);
    return true;
  }

  /// Packs and scores all blocks; of two buffers, one is packed while the other is scored.
  bool score(KeyRange all) {
    const int64_t begin = all.begin / kIndexerBlock * kIndexerBlock;
    if (kBlocks == 2) {
      blocks_.pack(begin, scorer_);
      scorer_.finish([](int) {});
    }
    for (int64_t first = begin; first < all.end; first += kIndexerBlock) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      scorer_.resume();
      blocks_.pack(first + (kBlocks - 1) * kIndexerBlock, scorer_);
      score_block(first, all.end);
    }
    return true;
  }

  /// Scores the keys in [first, first + kIndexerBlock) that queries see; more keys follow up to
  /// `last`.
  void score_block(int64_t first, int64_t last) {
    const char* const* next =
        kBlocks == 1 ? blocks_.locate_next(first + kIndexerBlock, last) : nullptr;
    const auto done = [this, first](int i) { take_scores(i, first); };
    for (int i = 0; i < tile_.num_queries; ++i) {
      const KeyRange range = clipped(scored_keys(tile_, tile_.queries[i]), first);
      if (range.begin >= range.end) continue;
      const ScoreTask task = {
          .index = i,
          .query = query(i),
          .block = blocks_.keys(first),
          .begin = static_cast<int>(range.begin - first),
          .end = static_cast<int>(range.end - first),
          .scores = scores_,
          .next = next,
      };
      scorer_.score(task, done);
      next = nullptr;
    }
    scorer_.finish(done);
  }

  /// Takes the scores of query i. Not inlined: scorers keep their sums in registers.
  [[gnu::noinline]] void take_scores(int i, int64_t first) {
    const IndexerQuery& asked = tile_.queries[i];
    const KeyRange range = clipped(scored_keys(tile_, asked), first);
    const auto begin = static_cast<int>(range.begin - first);
    const auto end = static_cast<int>(range.end - first);
    if (tile_.keys.scales != nullptr) apply_scales(blocks_.scales(first), begin, end);
    if (asked.logits == nullptr) {
      streams_.push(i, scores_ + begin, end - begin, range.begin);
    } else {
      float* logits = asked.logits + (range.begin - asked.begin);
      __builtin_memcpy(logits, scores_ + begin, (end - begin) * sizeof(float));
    }
  }

  void write_indices(int i) {
    const IndexerQuery& asked = tile_.queries[i];
    if (asked.logits != nullptr) return;
    if (!takes_all_keys(tile_, asked)) {
      streams_.finish(i);
      return;
    }
    const int64_t count = asked.end - asked.begin;
    for (int64_t j = 0; j < tile_.topk; ++j) {
      asked.indices[j] = j < count ? static_cast<int32_t>(asked.begin - asked.origin + j) : -1;
    }
  }

  void apply_scales(const float* scales, int begin, int end) {
    for (int i = begin / kLanes * kLanes; i < end; i += kLanes) {
      store(scores_ + i, mul(load(scores_ + i), load(scales + i)));
    }
  }

  char* query(int i) const { return queries_ + i * query_bytes_; }

  const IndexerTile& tile_;
  Scorer scorer_;
  const int64_t query_bytes_;
  char* const queries_;
  float* const scores_;
  IndexerBlocks<Scorer> blocks_;
  QueryStreams streams_;
};

template <class Scorer>
constexpr IndexerKernel indexer_kernel() {
  return {
      .scratch_bytes = &IndexerLoop<Scorer>::scratch_bytes,
      .run = &IndexerLoop<Scorer>::run,
  };
}

template <class T>
using Float32Scorer = PanelScorer<T, FloatScores<Float32Engine>>;

/// Instruction sets have their own scorers for bfloat16, which take float8_e4m3fn too, and for
/// int8.
template <
    template <class> class Bfloat16Scorer = Float32Scorer,
    template <class> class Int8Scorer = Float32Scorer>
constexpr IndexerKernels indexer_kernels() {
  return {
      .of_type =
          {
              indexer_kernel<Float32Scorer<float>>(),
              indexer_kernel<Bfloat16Scorer<Bfloat16>>(),
              indexer_kernel<Bfloat16Scorer<Float8>>(),
              indexer_kernel<Int8Scorer<int8_t>>(),
          },
      .merge_scratch_bytes = &merge_scratch_bytes,
      .merge = &merge_indexer_parts,
  };
}

}  // namespace
}  // namespace cpattn::kernels
