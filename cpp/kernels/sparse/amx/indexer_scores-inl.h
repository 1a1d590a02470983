// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores of the indexer on tiles: 32 heads of a token are the rows of a product, and 32 keys are
// its columns. Needs the vector layer and the tiles included first.
//
// While the tiles multiply one block, the vector units weight and add the heads of the
// one before, a slice after each product (see products-inl.h for why). Beside
// products they have one port for multiply-adds, maxima and conversions and another for
// comparisons: hence relu by mask.
#include "kernels/engines/amx/products-inl.h"

namespace cpattn::kernels {
namespace {

constexpr int kHeadBlock = kScoreRows;
constexpr int kKeyBlock = 2 * kTileRows;
constexpr int kBlockScores = kHeadBlock * kKeyBlock;

/// The products that tiles compute. Packed operands are counted in Bfloat16 for every type: two
/// signed bytes take the place of one.
struct Bfloat16Product {
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    static_assert(kTilesHaveRoles<kSum, kLeft, kRight>);
    multiply_tiles<kSum, kLeft, kRight>();
  }
  static Vector relu(const float* p) {
    const Vector x = load(p);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(0.0F), _CMP_NLE_UQ), x);  // NaN stays
  }
};
struct Int8Product {
  template <int kSum, int kLeft, int kRight>
  static void multiply() {
    static_assert(kTilesHaveRoles<kSum, kLeft, kRight>);
    multiply_int8_tiles<kSum, kLeft, kRight>();
  }
  static Vector relu(const float* p) {
    const __m512i x = _mm512_load_si512(p);
    return _mm512_maskz_cvtepi32_ps(_mm512_cmpgt_epi32_mask(x, _mm512_setzero_si512()), x);
  }
};

/// The weighted sums over heads of one token for 32 keys. Blocks of 32 heads come one after the
/// other. Heads below 16 of a block are added up apart from the others, which makes four chains of
/// dependent adds: fewer would be slower than the products.
template <class Product>
class HeadSums {
 public:
  void start(const float* scores, const float* weights) {
    scores_ = scores;
    weights_ = weights;
    left_ = kTileRows;
  }

  /// Adds the next kHeads heads below 16, and as many from 16 on.
  template <int kHeads>
  [[gnu::always_inline]] void take() {
    if (left_ == 0) return;
#pragma GCC unroll 4
    for (int i = 0; i < kHeads; ++i) {
      const float* scores = scores_ + i * kLanes;
      const Vector weight = splat(weights_[i]);
      const Vector other = splat(weights_[i + kTileRows]);
      low_[0] = fma(Product::relu(scores), weight, low_[0]);
      low_[1] = fma(Product::relu(scores + kTileFloats), weight, low_[1]);
      high_[0] = fma(Product::relu(scores + 2 * kTileFloats), other, high_[0]);
      high_[1] = fma(Product::relu(scores + 3 * kTileFloats), other, high_[1]);
    }
    scores_ += kHeads * kLanes;
    weights_ += kHeads;
    left_ -= kHeads;
  }

  [[gnu::always_inline]] void take_rest() {
    while (left_ > 0) take<1>();
  }

  [[gnu::always_inline]] void write(float* sums) const {
    store(sums, add(low_[0], high_[0]));
    store(sums + kLanes, add(low_[1], high_[1]));
  }

  [[gnu::always_inline]] void clear() { low_[0] = low_[1] = high_[0] = high_[1] = splat(0.0F); }

 private:
  const float* scores_ = nullptr;
  const float* weights_ = nullptr;
  int left_ = 0;
  Vector low_[2] = {splat(0.0F), splat(0.0F)};
  Vector high_[2] = {splat(0.0F), splat(0.0F)};
};

/// A query and blocks of 32 keys.
struct HeadBlocks {
  const Bfloat16* queries;  // [heads / 16][depth / 32][16][32]
  const float* weights;     // [heads]
  const Bfloat16* keys;     // [keys / 16][depth / 32][16 pairs][16][2]
  int num_heads;            // their rows and weights are padded to a multiple of 32
  int64_t depth;            // a multiple of 32
  int query;                // the query's number
  int begin, end;           // of the blocks of keys
  float* sums;              // the scores of `keys`; scores outside the blocks stay unchanged
};

/// Starts (kFirst) or continues the scores of 32 heads and 32 keys.
template <class Product, bool kFirst, class Slice>
[[gnu::always_inline]] inline void multiply_heads(
    const Bfloat16* queries,
    const Bfloat16* keys,
    int64_t stride,
    PendingSums& pending,
    Slice& slice
) {
  load_tile<4>(queries);
  load_tile<6>(keys);
  if constexpr (kFirst) pending.begin<0>();
  Product::template multiply<0, 4, 6>();
  slice();
  load_tile<7>(keys + stride);
  if constexpr (kFirst) pending.begin<1>();
  Product::template multiply<1, 4, 7>();
  slice();
  load_tile<5>(queries + stride);
  if constexpr (kFirst) pending.begin<2>();
  Product::template multiply<2, 5, 6>();
  slice();
  if constexpr (kFirst) pending.begin<3>();
  Product::template multiply<3, 5, 7>();
  slice();
}

/// Scores of one query after the other. Scores that a call has started end during the first
/// products of the next call, or with finish().
template <class Product>
class HeadProducts {
 public:
  HeadProducts() : pending_(scores_[0]) {}

  /// Tells done(x.query) when all scores are there. While `other` work is pending(), the vector
  /// units take() some of it during each block of products.
  template <class Done, class Work>
  void multiply(const HeadBlocks& x, Done done, Work& work) {
    // The slices of a block's products are for 16 pairs of heads.
    if (x.depth == kTileDepth) {
      multiply<4>(x, done, work);
    } else if (x.depth < 4 * kTileDepth) {
      multiply<2>(x, done, work);
    } else {
      multiply<1>(x, done, work);
    }
  }

  template <class Done>
  void finish(Done done) {
    complete(heads_, done);
    pending_.flush();
    turn_to_next(heads_);
    complete(heads_, done);
    added_ = {};
  }

 private:
  /// Scores in tiles or memory, and the actions at their end.
  struct Block {
    float* scores = nullptr;  // null: no block
    const float* weights = nullptr;
    int num_heads = 0;
    float* sums = nullptr;  // null unless these are the last heads
    int query = -1;         // that the block is the last of
  };

  template <int kHeads, class Done, class Work>
  void multiply(const HeadBlocks& x, Done done, Work& work) {
    HeadSums<Product> heads = heads_;
    const auto slice = [&]() __attribute__((always_inline)) { heads.template take<kHeads>(); };
    const int64_t stride = x.depth * kTileRows;
    const Bfloat16* keys = x.keys + 2 * stride * x.begin;
    for (int block = x.begin; block < x.end; ++block, keys += 2 * stride) {
      const Bfloat16* queries = x.queries;
      for (int head = 0; head < x.num_heads; head += kHeadBlock, queries += 2 * stride) {
        multiply_heads<Product, true>(queries, keys, stride, pending_, slice);
        complete(heads, done);
        turn_to_next(heads);
        if (work.pending()) {
          heads_ = heads;  // as in complete(): not across a call
          work.take();
          heads = heads_;
        }
        for (int64_t k = kTileElements; k < stride; k += kTileElements) {
          multiply_heads<Product, false>(queries + k, keys + k, stride, pending_, slice);
        }
        const bool last = head + kHeadBlock >= x.num_heads;
        float* scores = scores_[turn_ ^= 1];
        pending_.set_target(scores);
        started_ = {
            .scores = scores,
            .weights = x.weights + head,
            .num_heads = x.num_heads - head,
            .sums = last ? x.sums + block * kKeyBlock : nullptr,
            .query = last && block + 1 == x.end ? x.query : -1,
        };
      }
    }
    heads_ = heads;
  }

  /// Takes the rest of a block.
  template <class Done>
  [[gnu::always_inline]] void complete(HeadSums<Product>& heads, Done& done) {
    heads.take_rest();
    if (added_.sums == nullptr) return;
    heads.write(added_.sums);
    if (added_.query >= 0) done(added_.query);
    // This comes after the call: the compiler would keep sums that live across a call in memory
    // everywhere.
    heads.clear();
  }

  /// Switches to the block that was started last, whose scores are in memory now.
  [[gnu::always_inline]] void turn_to_next(HeadSums<Product>& heads) {
    added_ = started_;
    started_ = {};
    if (added_.scores == nullptr) return;
    if (added_.num_heads < kHeadBlock) clear_heads(added_.scores, added_.num_heads);
    heads.start(added_.scores, added_.weights);
  }

  /// Clears the padding rows of the block: zero times an infinity has left NaN there.
  static void clear_heads(float* scores, int from) {
    for (int head = from; head < kHeadBlock; ++head) {
      float* row = scores + head / kTileRows * 2 * kTileFloats + head % kTileRows * kLanes;
      store(row, splat(0.0F));
      store(row + kTileFloats, splat(0.0F));
    }
  }

  alignas(64) float scores_[2][kBlockScores] = {};
  int turn_ = 0;
  PendingSums pending_;
  HeadSums<Product> heads_;
  Block started_;
  Block added_;
};

}  // namespace
}  // namespace cpattn::kernels
