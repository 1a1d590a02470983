// SPDX-License-Identifier: Apache-2.0
#pragma once

// The indexer on AMX tiles: the Scorer for IndexerLoop. Needs the vector layer and the
// tiles included first.
#include "kernels/sparse/amx/indexer_scores-inl.h"
#include "kernels/sparse/indexer-inl.h"

namespace cpattn::kernels {
namespace {

/// The conversion of rows of T to operands of the tiles. load() returns the kElements elements from
/// `from` on, with zeros after the first n.
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

/// Dimensions of packed operands, in Bfloat16: two int8 count as one.
template <class T>
int64_t tile_depth(int dim) {
  constexpr int kElements = IndexerFormat<T>::kElements;
  return int64_t{(dim + kElements - 1) / kElements} * kTileDepth;
}

/// Keys that are being packed into tiles, as columns [16 keys][depth / 32][16 pairs][16 keys][2].
template <class T>
class KeyPacker {
  using Format = IndexerFormat<T>;

 public:
  explicit KeyPacker(int dim) : dim_(dim) {}

  /// Columns from `end` on, up to a multiple of 32, will be zeros.
  void start(const char* const* rows, int begin, int end, Bfloat16* block) {
    rows_ = rows;
    key_ = begin;
    end_ = end;
    padded_end_ = round_up(end, kKeyBlock);
    tiles_ = block + int64_t{begin} * tile_depth<T>(dim_);
  }

  bool pending() const { return key_ < padded_end_; }

  /// Packs one tile.
  [[gnu::noinline]] void take() {
    fetch_ahead(rows_, key_, kTileRows, d_ * static_cast<int>(sizeof(T)));
    __m512i columns[kTileRows];
    for (int i = 0; i < kTileRows; ++i) {
      columns[i] = key_ + i < end_ ? Format::load(rows_[key_ + i] + d_ * sizeof(T), dim_ - d_)
                                   : _mm512_setzero_si512();
    }
    transpose(columns);
    for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(tiles_ + i * kTileDepth, columns[i]);
    tiles_ += kTileElements;
    d_ += Format::kElements;
    if (d_ < dim_) return;
    d_ = 0;
    key_ += kTileRows;
  }

 private:
  const int dim_;
  const char* const* rows_ = nullptr;
  int key_ = 0;
  int d_ = 0;
  int end_ = 0;
  int padded_end_ = 0;
  Bfloat16* tiles_ = nullptr;
};

/// The Scorer of IndexerLoop on tiles, for queries and keys of type T.
template <class T>
class AmxScorer {
  using Format = IndexerFormat<T>;
  static constexpr int kStep = Format::kElements;

 public:
  static constexpr int kBlocks = 2;

  explicit AmxScorer(const IndexerTile& tile)
      : tile_(tile),
        padded_heads_(padded_heads(tile.num_heads)),
        depth_(tile_depth<T>(tile.dim)),
        packer_(tile.dim) {}

  static int64_t query_bytes(int num_heads, int dim) {
    constexpr int64_t kWeightBytes = sizeof(float);
    return padded_heads(num_heads) * (tile_depth<T>(dim) * kOperandBytes + kWeightBytes);
  }
  static int64_t block_bytes(int dim) { return tile_depth<T>(dim) * kOperandBytes * kIndexerBlock; }

  void pack_query(const IndexerQuery& asked, char* query) const {
    const auto* q = static_cast<const char*>(asked.q);
    auto* tiles = reinterpret_cast<Bfloat16*>(query);
    for (int head = 0; head < padded_heads_; ++head) {
      Bfloat16* row = tiles + head / kTileRows * kTileRows * depth_ + head % kTileRows * kTileDepth;
      for (int d = 0; d < tile_.dim; d += kStep, row += kTileElements) {
        const __m512i elements = head < tile_.num_heads
                                     ? Format::load(q + d * sizeof(T), tile_.dim - d)
                                     : _mm512_setzero_si512();
        _mm512_store_si512(row, elements);
      }
      q += tile_.head_stride * static_cast<int64_t>(sizeof(T));
    }
    float* weights = weights_of(query);
    __builtin_memset(weights, 0, padded_heads_ * sizeof(float));
    __builtin_memcpy(weights, asked.weights, tile_.num_heads * sizeof(float));
  }

  void pack_keys(const char* const* rows, int begin, int end, char* block) {
    packer_.start(rows, begin, end, reinterpret_cast<Bfloat16*>(block));
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
    products_.multiply(blocks, done, packer_);
  }

  void resume() const { scope_.configure(); }

  template <class Done>
  void finish(Done done) {
    products_.finish(done);
    for (; packer_.pending(); packer_.take()) keep_tiles_awake();
  }

 private:
  static constexpr int64_t kOperandBytes = sizeof(Bfloat16);

  static int64_t padded_heads(int num_heads) { return round_up(num_heads, kHeadBlock); }

  float* weights_of(char* query) const {
    return reinterpret_cast<float*>(query + padded_heads_ * depth_ * kOperandBytes);
  }

  const TileScope scope_;
  const IndexerTile& tile_;
  const int64_t padded_heads_;
  const int64_t depth_;  // of packed operands, in Bfloat16
  HeadProducts<typename Format::Product> products_;
  KeyPacker<T> packer_;
};

}  // namespace
}  // namespace cpattn::kernels
