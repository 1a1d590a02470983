// SPDX-License-Identifier: Apache-2.0
#pragma once

// The indexer: every query of a tile meets a block of keys that was packed once.
// Needs the vector layer and the engines included first.
#include "kernels/attention/key_rows-inl.h"
#include "kernels/sparse/indexer_kernel.h"
#include "kernels/sparse/indexer_scores-inl.h"
#include "kernels/sparse/indexer_topk-inl.h"

namespace cpattn::kernels {
namespace {

/// The loop over blocks of keys. A Scorer packs queries and keys and multiplies:
///
///   query_bytes(num_heads, dim), block_bytes(dim)   of what it packs, multiples of 64
///   Scorer(tile)
///   pack_query(asked, query)
///   pack_keys(rows, begin, end, block)   keys rows[begin..end) of a block, begin a
///       multiple of 32; 32 rows more are there to be fetched. Either at once, or, where
///       kBlocks is 2 and not 1, by the end of finish(), beside the scores of another block
///   score(task, done)   tells done(task.index) when the scores are there: at once, or
///       during the next call
///   finish(done)   ends what is under way
///   resume()   after other code of this thread may have used any register; nothing is
///       under way
///
/// A score must not depend on the block that its key is in.
template <class Scorer>
class IndexerLoop {
 public:
  static int64_t scratch_bytes(int32_t num_queries, int32_t num_heads, int32_t dim, int32_t topk) {
    return num_queries * Scorer::query_bytes(num_heads, dim) +
           kBlocks * (Scorer::block_bytes(dim) + kRowBytes) + kRowBytes +
           QueryStreams::bytes(num_queries, topk);
  }

  static bool run(const IndexerTile* tile, void* scratch) {
    return IndexerLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  static constexpr int kBlocks = Scorer::kBlocks;
  /// Of scores or scales of a block.
  static constexpr int64_t kRowBytes = kIndexerBlock * sizeof(float);

  struct Block {
    char* keys;
    float* scales;
    // With a granule more that scorers may fetch ahead.
    const char* rows[kIndexerBlock + kKeyGranule];
  };

  IndexerLoop(const IndexerTile& tile, char* scratch)
      : tile_(tile),
        scorer_(tile),
        query_bytes_(Scorer::query_bytes(tile.num_heads, tile.dim)),
        queries_(scratch),
        scores_(reinterpret_cast<float*>(queries_ + tile.num_queries * query_bytes_)),
        streams_(tile, carve_blocks(reinterpret_cast<char*>(scores_) + kRowBytes)) {}

  /// Gives what comes after them in scratch.
  char* carve_blocks(char* scratch) {
    for (Block& block : blocks_) {
      block.keys = scratch;
      block.scales = reinterpret_cast<float*>(scratch + Scorer::block_bytes(tile_.dim));
      scratch = reinterpret_cast<char*>(block.scales) + kRowBytes;
    }
    return scratch;
  }

  bool run() {
    for (int i = 0; i < tile_.num_queries; ++i) {
      scorer_.pack_query(tile_.queries[i], query(i));
    }
    KeyRange all = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) all = widened(all, scored(tile_.queries[i]));
    if (all.begin < all.end && !score(all)) return false;
    for (int i = 0; i < tile_.num_queries; ++i) write_indices(i);
    return true;
  }

  /// Of two blocks one is packed while the other is scored.
  bool score(KeyRange all) {
    const int64_t begin = all.begin / kIndexerBlock * kIndexerBlock;
    if (kBlocks == 2) {
      pack(begin);
      scorer_.finish([](int) {});
    }
    for (int64_t first = begin; first < all.end; first += kIndexerBlock) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      scorer_.resume();
      pack(first + (kBlocks - 1) * kIndexerBlock);
      score_block(first, all.end);
    }
    return true;
  }

  /// Keys [first, first + kIndexerBlock), as far as queries see them; there are others up
  /// to `last`.
  void score_block(int64_t first, int64_t last) {
    const char* const* next = kBlocks == 1 ? locate_next(first + kIndexerBlock, last) : nullptr;
    const auto done = [this, first](int i) { take_scores(i, first); };
    for (int i = 0; i < tile_.num_queries; ++i) {
      const KeyRange range = clipped(scored(tile_.queries[i]), first);
      if (range.begin >= range.end) continue;
      const ScoreTask task = {
          .index = i,
          .query = query(i),
          .block = block_of(first).keys,
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

  /// Not inlined: scorers keep their sums in registers.
  [[gnu::noinline]] void take_scores(int i, int64_t first) {
    const IndexerQuery& asked = tile_.queries[i];
    const KeyRange range = clipped(scored(asked), first);
    const auto begin = static_cast<int>(range.begin - first);
    const auto end = static_cast<int>(range.end - first);
    if (tile_.keys.scales != nullptr) apply_scales(block_of(first).scales, begin, end);
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
    if (!takes_all(asked)) {
      streams_.finish(i);
      return;
    }
    const int64_t count = asked.end - asked.begin;
    for (int64_t j = 0; j < tile_.topk; ++j) {
      asked.indices[j] = j < count ? static_cast<int32_t>(asked.begin - asked.origin + j) : -1;
    }
  }

  /// Packs keys [first, first + kIndexerBlock), as far as queries see them.
  void pack(int64_t first) {
    KeyRange seen = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) {
      seen = widened(seen, clipped(scored(tile_.queries[i]), first));
    }
    if (seen.begin >= seen.end) return;
    const auto begin = static_cast<int>(seen.begin - first);
    const auto end = static_cast<int>(seen.end - first);
    const IndexerKeys& keys = tile_.keys;
    Block& block = block_of(first);
    if (keys.scales != nullptr) {
      locate(
          keys.scales, keys.scale_page_bytes, keys.scale_row_bytes, first, begin, end, block.rows
      );
      for (int i = begin; i < end; ++i) {
        __builtin_memcpy(block.scales + i, block.rows[i], sizeof(float));
      }
    }
    locate(keys.data, keys.page_bytes, keys.row_bytes, first, begin, end, block.rows);
    const int granule = begin / kKeyGranule * kKeyGranule;
    for (int i = granule; i < begin; ++i) block.rows[i] = block.rows[begin];
    const int fetched = round_up(end, kKeyGranule) + kKeyGranule;
    for (int i = end; i < fetched; ++i) block.rows[i] = block.rows[end - 1];
    scorer_.pack_keys(block.rows, granule, end, block.keys);
  }

  /// Addresses of the keys of a block, or null if there is none.
  const char* const* locate_next(int64_t first, int64_t last) {
    if (first >= last) return nullptr;
    const auto end = static_cast<int>(smaller(kIndexerBlock, last - first));
    const IndexerKeys& keys = tile_.keys;
    const char** rows = block_of(first).rows;
    locate(keys.data, keys.page_bytes, keys.row_bytes, first, 0, end, rows);
    for (int i = end; i < kIndexerBlock; ++i) rows[i] = rows[end - 1];
    return rows;
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

  void apply_scales(const float* scales, int begin, int end) {
    for (int i = begin / kLanes * kLanes; i < end; i += kLanes) {
      store(scores_ + i, mul(load(scores_ + i), load(scales + i)));
    }
  }

  Block& block_of(int64_t first) { return blocks_[first / kIndexerBlock % kBlocks]; }

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
  float* const scores_;
  Block blocks_[kBlocks];
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
