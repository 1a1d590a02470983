// SPDX-License-Identifier: Apache-2.0
#pragma once

// The indexer on AMX tiles: the Scorer for IndexerLoop. Needs the vector layer and the
// tiles included first.
#include "kernels/amx_indexer_scores-inl.h"
#include "kernels/indexer-inl.h"

namespace cpattn::kernels {
namespace {

/// How rows of T become operands of the tiles. load() gives the kElements elements at
/// `from`, of which there are n.
template <class T>
struct IndexerFormat;

template <>
struct IndexerFormat<Bfloat16> {
  using Product = Bfloat16Product;
  static constexpr int kElements = 32;
  static __m512i load(const char* from, int n) {
    return _mm512_maskz_loadu_epi32(_bzhi_u32(0xffff, n / 2), from);
  }
};

/// Codes have four bits of significand: as bfloat16 they are exact.
template <>
struct IndexerFormat<Float8> {
  using Product = Bfloat16Product;
  static constexpr int kElements = 32;
  static __m512i load(const char* from, int n) {
    return expand(_mm256_maskz_loadu_epi32(_bzhi_u32(0xff, n / 4), from));
  }
};

template <>
struct IndexerFormat<int8_t> {
  using Product = Int8Product;
  static constexpr int kElements = 64;
  static __m512i load(const char* from, int n) {
    return _mm512_maskz_loadu_epi32(_bzhi_u32(0xffff, n / 4), from);
  }
};

template <class T>
class AmxScorer {
  using Format = IndexerFormat<T>;
  static constexpr int kStep = Format::kElements;

 public:
  explicit AmxScorer(const IndexerTile& tile)
      : tile_(tile), padded_heads_(padded_heads(tile.num_heads)), depth_(depth_of(tile.dim)) {}

  static int64_t query_bytes(int num_heads, int dim) {
    constexpr int64_t kWeightBytes = sizeof(float);
    return padded_heads(num_heads) * (depth_of(dim) * kOperandBytes + kWeightBytes);
  }
  static int64_t block_bytes(int dim) { return depth_of(dim) * kOperandBytes * kIndexerBlock; }

  void pack_query(const IndexerQuery& asked, char* query) const {
    const auto* q = static_cast<const char*>(asked.q);
    auto* tiles = reinterpret_cast<Bfloat16*>(query);
    for (int head = 0; head < padded_heads_; ++head) {
      Bfloat16* row = tiles + head / kTileRows * kTileRows * depth_ + head % kTileRows * kTileDepth;
      for (int d = 0; d < tile_.dim; d += kStep, row += kTileElements) {
        const __m512i elements =
            head < tile_.num_heads ? Format::load(q + d * sizeof(T), smaller(kStep, tile_.dim - d))
                                   : _mm512_setzero_si512();
        _mm512_store_si512(row, elements);
      }
      q += tile_.head_stride * static_cast<int64_t>(sizeof(T));
    }
    float* weights = weights_of(query);
    __builtin_memset(weights, 0, padded_heads_ * sizeof(float));
    __builtin_memcpy(weights, asked.weights, tile_.num_heads * sizeof(float));
  }

  /// Columns of keys; those from `end` on, up to a multiple of 32, are zeros.
  void pack_keys(const char* const* rows, int begin, int end, char* block) const {
    auto* tiles = reinterpret_cast<Bfloat16*>(block) + begin * depth_;
    for (int key = begin; key < end || key % kKeyBlock != 0; key += kTileRows) {
      for (int d = 0; d < tile_.dim; d += kStep, tiles += kTileElements) {
        keep_tiles_awake();
        fetch_ahead(rows, key, kTileRows, d * static_cast<int>(sizeof(T)));
        __m512i columns[kTileRows];
        for (int i = 0; i < kTileRows; ++i) {
          columns[i] =
              key + i < end
                  ? Format::load(rows[key + i] + d * sizeof(T), smaller(kStep, tile_.dim - d))
                  : _mm512_setzero_si512();
        }
        transpose(columns);
        for (int i = 0; i < kTileRows; ++i) {
          _mm512_store_si512(tiles + i * kTileDepth, columns[i]);
        }
      }
    }
  }

  template <class Done>
  void score(const ScoreTask& task, Done done) {
    const HeadBlocks blocks = {
        .queries = reinterpret_cast<const Bfloat16*>(task.query),
        .weights = weights_of(task.query),
        .keys = reinterpret_cast<const Bfloat16*>(task.block),
        .num_heads = tile_.num_heads,
        .depth = depth_,
        .query = task.index,
        .begin = task.begin / kKeyBlock,
        .end = (task.end + kKeyBlock - 1) / kKeyBlock,
        .sums = task.scores,
    };
    products_.multiply(blocks, done);
  }

  template <class Done>
  void finish(Done done) {
    products_.finish(done);
  }

 private:
  static constexpr int64_t kOperandBytes = sizeof(Bfloat16);

  static int64_t padded_heads(int num_heads) { return round_up(num_heads, kHeadBlock); }
  static int64_t depth_of(int dim) { return round_up(dim, kStep) / kStep * kTileDepth; }

  float* weights_of(char* query) const {
    return reinterpret_cast<float*>(query + padded_heads_ * depth_ * kOperandBytes);
  }

  const TileScope scope_;
  const IndexerTile& tile_;
  const int64_t padded_heads_;
  const int64_t depth_;  // of packed operands, in Bfloat16
  HeadProducts<typename Format::Product> products_;
};

}  // namespace
}  // namespace cpattn::kernels
