// SPDX-License-Identifier: Apache-2.0
#pragma once

// The indexer: every query of a tile meets a block of keys that was packed once.
// Needs the vector layer and the engines included first.
#include "kernels/indexer_kernel.h"
#include "kernels/indexer_scores-inl.h"
#include "kernels/indexer_topk-inl.h"
#include "kernels/key_rows-inl.h"

namespace cpattn::kernels {
namespace {

/// The loop over blocks of keys. A Scorer packs queries and keys and multiplies:
///
///   query_bytes(num_heads, dim), block_bytes(dim)   of what it packs, multiples of 64
///   Scorer(tile)
///   pack_query(asked, query)
///   pack_keys(rows, begin, end, block)   keys rows[begin..end) of a block, begin a
///       multiple of 32; 32 rows more are there to be fetched
///   score(task, done)   tells done(task.index) when the scores are there: at once, or
///       during the next call
///   finish(done)   ends the last one
///
/// A score must not depend on the block that its key is in.
template <class Scorer>
class IndexerLoop {
 public:
  static int64_t scratch_bytes(int32_t num_queries, int32_t num_heads, int32_t dim, int32_t topk) {
    return num_queries * Scorer::query_bytes(num_heads, dim) + Scorer::block_bytes(dim) +
           int64_t{2 * kIndexerBlock} * static_cast<int>(sizeof(float)) +
           QueryStreams::bytes(num_queries, topk);
  }

  static bool run(const IndexerTile* tile, void* scratch) {
    return IndexerLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  IndexerLoop(const IndexerTile& tile, char* scratch)
      : tile_(tile),
        scorer_(tile),
        query_bytes_(Scorer::query_bytes(tile.num_heads, tile.dim)),
        queries_(scratch),
        block_(queries_ + tile.num_queries * query_bytes_),
        scores_(reinterpret_cast<float*>(block_ + Scorer::block_bytes(tile.dim))),
        scales_(scores_ + kIndexerBlock),
        streams_(tile, reinterpret_cast<char*>(scales_ + kIndexerBlock)) {}

  bool run() {
    for (int i = 0; i < tile_.num_queries; ++i) {
      scorer_.pack_query(tile_.queries[i], query(i));
    }
    KeyRange all = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) all = widened(all, scored(tile_.queries[i]));
    for (int64_t first = all.begin / kIndexerBlock * kIndexerBlock; first < all.end;
         first += kIndexerBlock) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      run_block(first);
    }
    for (int i = 0; i < tile_.num_queries; ++i) write_indices(i);
    return true;
  }

  /// Keys [first, first + kIndexerBlock), as far as queries see them.
  void run_block(int64_t first) {
    KeyRange seen = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) {
      seen = widened(seen, clipped(scored(tile_.queries[i]), first));
    }
    if (seen.begin >= seen.end) return;
    pack(first, static_cast<int>(seen.begin - first), static_cast<int>(seen.end - first));
    const auto done = [this, first](int i) { take_scores(i, first); };
    for (int i = 0; i < tile_.num_queries; ++i) {
      const KeyRange range = clipped(scored(tile_.queries[i]), first);
      if (range.begin >= range.end) continue;
      const ScoreTask task = {
          .index = i,
          .query = query(i),
          .block = block_,
          .begin = static_cast<int>(range.begin - first),
          .end = static_cast<int>(range.end - first),
          .scores = scores_,
      };
      scorer_.score(task, done);
    }
    scorer_.finish(done);
  }

  /// Not inlined: scorers keep their sums in registers.
  [[gnu::noinline]] void take_scores(int i, int64_t first) {
    const IndexerQuery& asked = tile_.queries[i];
    const KeyRange range = clipped(scored(asked), first);
    const auto begin = static_cast<int>(range.begin - first);
    const auto end = static_cast<int>(range.end - first);
    if (tile_.keys.scales != nullptr) apply_scales(begin, end);
    if (asked.logits == nullptr) {
      streams_.push(i, scores_ + begin, end - begin, range.begin);
    } else {
      float* logits = asked.logits + (range.begin - asked.begin);
      __builtin_memcpy(logits, scores_ + begin, (end - begin) * sizeof(float));
    }
  }

  /// The keys of a query whose scores are needed: none where it wants all of its keys.
  KeyRange scored(const IndexerQuery& asked) const {
    if (takes_all(asked)) return {0, 0};
    return {asked.begin, asked.end};
  }
  bool takes_all(const IndexerQuery& asked) const {
    return asked.logits == nullptr && asked.values == nullptr &&
           asked.end - asked.begin <= tile_.topk;
  }

  void write_indices(int i) {
    const IndexerQuery& asked = tile_.queries[i];
    if (asked.logits != nullptr) return;
    if (!takes_all(asked)) return streams_.finish(i);
    const int64_t count = asked.end - asked.begin;
    for (int64_t j = 0; j < tile_.topk; ++j) {
      asked.indices[j] = j < count ? static_cast<int32_t>(asked.begin - asked.origin + j) : -1;
    }
  }

  /// Packs keys first + [begin, end), and from the multiple of 32 before on.
  void pack(int64_t first, int begin, int end) {
    const IndexerKeys& keys = tile_.keys;
    const int granule = begin / kKeyGranule * kKeyGranule;
    locate(keys.data, keys.page_bytes, keys.row_bytes, first, begin, end, rows_);
    for (int i = granule; i < begin; ++i) rows_[i] = rows_[begin];
    const int fetched = round_up(end, kKeyGranule) + kKeyGranule;
    for (int i = end; i < fetched; ++i) rows_[i] = rows_[end - 1];
    for (int i = granule; i < end; i += kKeyGranule) {
      const int stop = i + kKeyGranule < end ? i + kKeyGranule : end;
      scorer_.pack_keys(rows_, i, stop, block_);
    }
    if (keys.scales == nullptr) return;
    locate(keys.scales, keys.scale_page_bytes, keys.scale_row_bytes, first, begin, end, rows_);
    for (int i = begin; i < end; ++i) __builtin_memcpy(scales_ + i, rows_[i], sizeof(float));
  }

  /// Addresses of rows first + [begin, end), into rows[begin..end).
  void locate(
      const void* data,
      int64_t page_bytes,
      int64_t row_bytes,
      int64_t first,
      int begin,
      int end,
      const char** rows
  ) const {
    int64_t page = (first + begin) / tile_.keys.page_size;
    int64_t offset = (first + begin) % tile_.keys.page_size;
    for (int i = begin; i < end; ++page, offset = 0) {
      const char* base = static_cast<const char*>(data) + tile_.keys.pages[page] * page_bytes;
      for (; i < end && offset < tile_.keys.page_size; ++i, ++offset) {
        rows[i] = base + offset * row_bytes;
      }
    }
  }

  void apply_scales(int begin, int end) {
    for (int i = begin / kLanes * kLanes; i < end; i += kLanes) {
      store(scores_ + i, mul(load(scores_ + i), load(scales_ + i)));
    }
  }

  char* query(int i) const { return queries_ + i * query_bytes_; }

  static KeyRange clipped(KeyRange range, int64_t first) {
    return {larger(range.begin, first), smaller(range.end, first + kIndexerBlock)};
  }

  static KeyRange widened(KeyRange range, KeyRange other) {
    if (other.begin >= other.end) return range;
    return {smaller(range.begin, other.begin), larger(range.end, other.end)};
  }

  const IndexerTile& tile_;
  Scorer scorer_;
  const int64_t query_bytes_;
  char* const queries_;
  char* const block_;
  float* const scores_;
  float* const scales_;
  QueryStreams streams_;
  // With a granule more that scorers may fetch ahead.
  const char* rows_[kIndexerBlock + kKeyGranule];
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

/// What differs among instruction sets are the scorers of bfloat16, which take
/// float8_e4m3fn too, and of int8.
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
