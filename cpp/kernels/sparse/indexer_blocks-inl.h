// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks of keys that the indexer packs, and the contract of scorers. Needs the vector layer
// and the engines included first.
#include "kernels/boundary/indexer_kernel.h"
#include "kernels/rows/key_rows-inl.h"
#include "kernels/sparse/indexer_scores-inl.h"

namespace cpattn::kernels {
namespace {

/// The Scorer of an IndexerLoop packs queries and keys and multiplies.
///
///   kBlocks   blocks of keys that are packed at a time: 1, or 2, one beside the other's scores
///   query_bytes(num_heads, dim), block_bytes(dim)   sizes of packed data, multiples of 64
///   Scorer(tile)
///   pack_query(asked, query)
///   pack_keys(rows, begin, end, block)   keys rows[begin..end) of a block, begin a
///       multiple of 32, followed by 32 addresses to prefetch. It packs at once or, if kBlocks
///       is 2, until the end of finish(), during the scores of another block
///   score(task, done)   calls done(task.index) when the scores are there: at once, or
///       during the next call
///   finish(done)   completes pending work
///   resume()   after other code of this thread may have used any register; no work is pending
///
/// A score must not depend on the block that its key is in.
template <class Scorer>
concept IndexerScorer = requires(
    Scorer& scorer,
    const IndexerTile& tile,
    const IndexerQuery& asked,
    char* packed,
    const char* const* rows,
    int n,
    const ScoreTask& task,
    void (*done)(int index)
) {
  requires Scorer::kBlocks == 1 || Scorer::kBlocks == 2;
  int64_t{Scorer::query_bytes(n, n)};
  int64_t{Scorer::block_bytes(n)};
  Scorer(tile);
  scorer.pack_query(asked, packed);
  scorer.pack_keys(rows, n, n, packed);
  scorer.score(task, done);
  scorer.finish(done);
  scorer.resume();
};

/// Bytes of the scores, or the scales, of a block.
constexpr int64_t kIndexerRowBytes = kIndexerBlock * sizeof(float);

/// Whether a query takes all of its keys, which then need no scores.
inline bool takes_all_keys(const IndexerTile& tile, const IndexerQuery& asked) {
  return asked.logits == nullptr && asked.values == nullptr && asked.end - asked.begin <= tile.topk;
}

/// The keys of a query whose scores are needed.
inline KeyRange scored_keys(const IndexerTile& tile, const IndexerQuery& asked) {
  if (takes_all_keys(tile, asked)) return {0, 0};
  return {asked.begin, asked.end};
}

/// The keys of a range that are in the block that begins with key `first`.
inline KeyRange clipped(KeyRange range, int64_t first) {
  return {larger(range.begin, first), smaller(range.end, first + kIndexerBlock)};
}

/// The smallest range with the keys of both.
inline KeyRange widened(KeyRange range, KeyRange other) {
  if (other.begin >= other.end) return range;
  return {smaller(range.begin, other.begin), larger(range.end, other.end)};
}

/// The blocks that the scorer has packed at a time; they take turns.
template <class Scorer>
class IndexerBlocks {
  static_assert(IndexerScorer<Scorer>);

 public:
  static int64_t bytes(int dim) {
    return Scorer::kBlocks * (Scorer::block_bytes(dim) + kIndexerRowBytes);
  }

  /// Packed keys and scales go to bytes(tile.dim) of scratch.
  IndexerBlocks(const IndexerTile& tile, char* scratch) : tile_(tile), end_(scratch) {
    for (Block& block : blocks_) {
      block.keys = end_;
      block.scales = reinterpret_cast<float*>(end_ + Scorer::block_bytes(tile.dim));
      end_ = reinterpret_cast<char*>(block.scales) + kIndexerRowBytes;
    }
  }

  /// The end of the blocks in scratch.
  char* end() const { return end_; }

  /// The packed keys and the scales of the block that begins with key `first`.
  char* keys(int64_t first) const { return blocks_[index_of(first)].keys; }
  const float* scales(int64_t first) const { return blocks_[index_of(first)].scales; }

  /// Packs the keys in [first, first + kIndexerBlock) that queries see.
  void pack(int64_t first, Scorer& scorer) {
    KeyRange seen = {INT64_MAX, 0};
    for (int i = 0; i < tile_.num_queries; ++i) {
      seen = widened(seen, clipped(scored_keys(tile_, tile_.queries[i]), first));
    }
    if (seen.begin >= seen.end) return;
    const auto begin = static_cast<int>(seen.begin - first);
    const auto end = static_cast<int>(seen.end - first);
    const IndexerKeys& keys = tile_.keys;
    Block& block = blocks_[index_of(first)];
    if (keys.scales != nullptr) {
      const PagedBytes scales = {keys.scales, keys.scale_page_bytes, keys.scale_row_bytes};
      locate(scales, first, begin, end, block.rows);
      for (int i = begin; i < end; ++i) {
        __builtin_memcpy(block.scales + i, block.rows[i], sizeof(float));
      }
    }
    locate({keys.data, keys.page_bytes, keys.row_bytes}, first, begin, end, block.rows);
    const int granule = begin / kKeyGranule * kKeyGranule;
    stand_in(block.rows, granule, begin, begin);
    stand_in(block.rows, end, round_up(end, kKeyGranule) + kKeyGranule, end - 1);
    scorer.pack_keys(block.rows, granule, end, block.keys);
  }

  /// Addresses of the keys of a block, or null if there is none.
  const char* const* locate_next(int64_t first, int64_t last) {
    if (first >= last) return nullptr;
    const auto end = static_cast<int>(smaller(kIndexerBlock, last - first));
    const IndexerKeys& keys = tile_.keys;
    const char** rows = blocks_[index_of(first)].rows;
    locate({keys.data, keys.page_bytes, keys.row_bytes}, first, 0, end, rows);
    stand_in(rows, end, kIndexerBlock, end - 1);
    return rows;
  }

 private:
  struct Block {
    char* keys;
    float* scales;
    // Addresses of keys, and of one granule more, which scorers may prefetch.
    const char* rows[kIndexerBlock + kKeyGranule];
  };

  static int64_t index_of(int64_t first) { return first / kIndexerBlock % Scorer::kBlocks; }

  /// Writes the addresses of rows first + [begin, end) to rows[begin..end).
  void locate(
      const PagedBytes& source, int64_t first, int begin, int end, const char** rows
  ) const {
    locate_rows(
        source, tile_.keys.pages, tile_.keys.page_size, first + begin, end - begin, rows + begin
    );
  }

  const IndexerTile& tile_;
  Block blocks_[Scorer::kBlocks];
  char* end_;
};

}  // namespace
}  // namespace cpattn::kernels
