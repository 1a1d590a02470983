// SPDX-License-Identifier: Apache-2.0
#pragma once

// Data of the attention loop on AMX tiles: its buffers, the steps of a block,
// and the vector work that is handed out in slices between products.
#include "kernels/amx/products-inl.h"
#include "kernels/amx/softmax-inl.h"
#include "kernels/attention/attention-inl.h"
#include "kernels/attention/row_factors-inl.h"

namespace cpattn::kernels {
namespace {

/// Keys packed at a time: one block, or as many as fit a quarter of a 2 MB L2
/// together with the next ones, which are fetched to it meanwhile. Q and O of
/// 1500 rows of head dimension 128 take half of it.
template <class T>
int64_t packed_keys(int depth, int v_head_dim) {
  constexpr int64_t kBytes = 512 * 1024;
  constexpr int64_t kMaxBlocks = kMaxPackedKeys / kAmxBlockKeys<T>;
  constexpr int64_t kPackedAndNext = (TileFormat<T>::kParts + 1) * sizeof(T);
  const int64_t block_bytes = kPackedAndNext * kAmxBlockKeys<T> * (int64_t{depth} + v_head_dim);
  return kAmxBlockKeys<T> * larger(1, smaller(kMaxBlocks, kBytes / block_bytes));
}

/// 32 rows of a group against 32 keys of a block.
struct Step {
  int row;          // the first row; a multiple of 32
  int count;        // rows
  int chunk;        // index of the 32 keys among the packed ones
  int first_chunk;  // the first chunk of the block that the group sees
  int end_chunk;    // one past the last
  bool last;        // the last step of the group in the block

  bool first() const { return chunk == first_chunk && row % kGroupRows == 0; }
};

/// Lists the steps of a tile for keys [first, first + n), one group of rows after
/// the other; returns their number.
template <class T>
int plan_steps(const AttentionTile& tile, int rows, int64_t first, int n, Step* list) {
  constexpr int kChunks = kAmxChunks<T>;
  int steps = 0;
  for (int group = 0; group < rows; group += kGroupRows) {
    const int end = static_cast<int>(smaller(group + kGroupRows, rows));
    const int64_t seen_from = visible_keys(tile, group / tile.group).begin - first;
    const int64_t seen_to = visible_keys(tile, (end - 1) / tile.group).end - first;
    int begin_key = static_cast<int>(larger(0, smaller(n, seen_from))) / kTileDepth * kTileDepth;
    int end_key = round_up(static_cast<int>(larger(0, smaller(n, seen_to))), kTileDepth);
    drop_hidden(tile, group / tile.group, (end - 1) / tile.group + 1, first, begin_key, end_key);
    const int end_chunk = end_key / kTileDepth;
    for (int chunk = begin_key / kTileDepth; chunk < end_chunk;) {
      const int block_end =
          static_cast<int>(smaller(end_chunk, chunk / kChunks * kChunks + kChunks));
      for (const int block_begin = chunk; chunk < block_end; ++chunk) {
        for (int row = group; row < end; row += kScoreRows) {
          const int count = static_cast<int>(smaller(kScoreRows, end - row));
          const bool last = chunk + 1 == block_end && row + count == end;
          list[steps++] = {row, count, chunk, block_begin, block_end, last};
        }
      }
    }
  }
  return steps;
}

/// The rows of a step on their way through softmax, handed out in slices. Everything is
/// inlined, so that its members stay in registers whatever memory the assembly between
/// slices may change.
template <class T>
class StepRows {
  using Group = SoftmaxGroup<T>;
  using Format = TileFormat<T>;

 public:
  [[gnu::always_inline]] StepRows(
      const SoftmaxGroup<T>& group, const Step& step, const float* scores
  )
      : group_(&group),
        row_(step.row % kGroupRows),
        end_(row_ + step.count),
        chunk_(step.chunk),
        factor_(splat(group.factor)),
        scores_(scores),
        biases_(group.biases + row_),
        sums_(group.exact_sums == nullptr ? nullptr : group.exact_sums + int64_t{row_} * kLanes),
        cells_(group.probabilities_of(row_, step.chunk)) {
    pin(factor_);
  }

  int count() const { return end_ - row_; }

  /// Takes the next kRows rows: 1, 2 or 4. Rows that fill up the last few may hold anything.
  template <int kRows>
  [[gnu::always_inline]] void take() {
    if (row_ >= end_) return;
    Vector x[kRows];
    Vector y[kRows];
    __m512i parts[kRows][Group::kParts];
    __m512i all = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vector bias = splat(biases_[i]);
      x[i] = fma(load(scores_ + score_offset(i)), factor_, bias);
      y[i] = fma(load(scores_ + score_offset(i) + kNextKeys), factor_, bias);
      Format::probabilities(exp2_, x[i], y[i], parts[i]);
      all = _mm512_or_si512(all, parts[i][0]);
    }
    if (__builtin_expect(outgrown(all), 0)) {
      for (int i = 0; i < kRows; ++i)
        group_->add_scores(row_ + i, chunk_, scores_ + score_offset(i));
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        for (int part = 0; part < Group::kParts; ++part) {
          _mm512_store_si512(cells_ + part * Group::kPartElements + i * kTileDepth, parts[i][part]);
        }
      }
      if (sums_ != nullptr) add_exact<kRows>(x, y);
    }
    row_ += kRows;
    scores_ += score_offset(kRows);
    biases_ += kRows;
    if (sums_ != nullptr) sums_ += kRows * kLanes;
    cells_ += kRows * kTileDepth;
  }

  [[gnu::always_inline]] void take_rest() {
    for (; row_ < end_; keep_tiles_awake()) take<4>();
  }

 private:
  template <int kRows>
  [[gnu::always_inline]] void add_exact(const Vector* x, const Vector* y) const {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      float* sum = sums_ + i * kLanes;
      store(sum, add(load(sum), add(exact_exp2_(x[i]), exact_exp2_(y[i]))));
    }
  }

  const SoftmaxGroup<T>* group_;
  int row_;
  int end_;
  int chunk_;
  Vector factor_;
  typename Format::Exponential exp2_;
  ExactExp2 exact_exp2_;
  const float* scores_;
  const float* biases_;
  float* sums_;
  Bfloat16* cells_;
};

/// The first column of a product with ones, on its way to the sums of rows: a slice of other
/// work take()s the next kRows of them.
struct PendingColumn {
  const float* product;  // [row][16]
  float* sums;           // [row]
  int count;             // a multiple of 4

  template <int kRows>
  [[gnu::always_inline]] void take() {
    if (count == 0) return;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sums[i] += product[i * kLanes];
    product += kRows * kLanes;
    sums += kRows;
    count -= kRows;
  }

  void take_rest() {
    while (count > 0) take<4>();
  }
};

/// Sixteen columns of P V on their way to O, [row][16] both: a slice of other work take()s the
/// next kRows rows.
struct PendingRows {
  const float* product;
  float* output;
  int count;  // a multiple of 16

  template <int kRows>
  [[gnu::always_inline]] void take() {
    if (count == 0) return;
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kLanes; i += kLanes) {
      store(output + i, add(load(output + i), load(product + i)));
    }
    product += kRows * kLanes;
    output += kRows * kLanes;
    count -= kRows;
  }

  void take_rest() {
    while (count > 0) take<4>();
  }
};

/// The addresses of the keys and values of a head that are packed together.
template <class T>
class SourceRows {
 public:
  explicit SourceRows(const AttentionTile& tile) : tile_(tile) {}

  /// Locates keys [first, first + n) of a head. No token sees the first `hidden` of them: they may
  /// hold anything, NaN too, so a visible one stands in for them.
  void locate(int head, int64_t first, int n, int hidden) {
    head_ = head;
    first_ = first;
    count_ = n;
    hidden_ = fetched_ = hidden;
    const int bytes = element_bytes<T>(tile_);
    const auto locate = [&](const PagedRows& source, const char** rows) {
      locate_rows(
          rows_of_head(source, head, bytes), tile_, first + hidden, n - hidden, bytes, rows + hidden
      );
      for (int i = 0; i < hidden; ++i) rows[i] = rows[hidden];
    };
    locate(tile_.k, k);
    if (tile_.rope_dim > 0) locate(tile_.k_rope, k_rope);
    if (tile_.expand == nullptr) locate(tile_.v, v);
  }

  int head() const { return head_; }
  int64_t first() const { return first_; }
  int count() const { return count_; }
  int hidden() const { return hidden_; }

  /// Reads the factors of the rows of these keys.
  void read_row_factors(const RowFactors& source, float* factors) const {
    read_factors(tile_, source, head_, first_, count_, hidden_, factors);
  }

  /// Brings the next n keys and their values to L2. They are too far apart in a
  /// cache of many heads for hardware to do so, and packing would wait for them.
  void fetch(int n) {
    const int bytes = element_bytes<T>(tile_);
    for (; n > 0 && fetched_ < count_; --n, ++fetched_) {
      fetch_row<2>(k[fetched_], stored_key_bytes<T>(tile_));
      if (tile_.rope_dim > 0) fetch_row<2>(k_rope[fetched_], tile_.rope_dim * bytes);
      if (tile_.expand == nullptr) fetch_row<2>(v[fetched_], tile_.v_head_dim * bytes);
    }
  }

  const char* k[kMaxPackedKeys];
  const char* k_rope[kMaxPackedKeys];
  const char* v[kMaxPackedKeys];

 private:
  const AttentionTile& tile_;
  int head_ = 0;
  int64_t first_ = 0;
  int count_ = 0;
  int hidden_ = 0;
  int fetched_ = 0;
};

/// Buffers in which keys and values become tiles.
template <class T>
struct TileBuffers {
  Bfloat16* keys;    // [keys / 16][part][depth / 32][16][16][2]
  Bfloat16* values;  // [block][v_head_dim / 16][chunks][part][16][16][2]
  T* zeros;          // [v_head_dim]
  T* expanded;       // [32][depth + v_head_dim], rows of keys and values

  void take(Carver& carver, int64_t num_keys, int64_t num_values, int depth, int v_head_dim) {
    constexpr int kParts = TileFormat<T>::kParts;
    carver.take(keys, num_keys * depth * kParts);
    carver.take(values, num_values * v_head_dim * kParts);
    carver.take(zeros, v_head_dim);
    carver.take(expanded, int64_t{kTileDepth} * (depth + v_head_dim));
    if (carver.base != nullptr) __builtin_memset(zeros, 0, sizeof(T) * v_head_dim);
  }
};

/// A tile whose first column is ones: it sums rows.
inline void fill_ones(Bfloat16* tile) {
  constexpr uint32_t kPairOfOnes = 0x3f803f80;
  __builtin_memset(tile, 0, sizeof(Bfloat16) * kTileElements);
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    __builtin_memcpy(tile + pair * kTileDepth, &kPairOfOnes, sizeof kPairOfOnes);
  }
}

/// The softmax states of rows on their way through the keys.
template <class T>
struct RowStates {
  static constexpr bool kSumsByProducts = TileFormat<T>::kSumsByProducts;

  float* sums;        // [rows], of the probabilities as P V has them
  float* exact_sums;  // [rows][16], of the probabilities before they were rounded
  float* references;  // [rows], scores; -inf before the first visible key
  float* biases;      // [rows], which make a score the exponent of its probability
  float* maxima;      // [rows][16], of the scores; where max_logits are wanted

  /// The LSE is that of exact exponentials, though P V may have rounded ones.
  static bool wants_exact_sums(const AttentionTile& tile) {
    return !kSumsByProducts || tile.lse != nullptr;
  }

  void take(Carver& carver, int64_t rows) {
    carver.take(sums, rows);
    carver.take(exact_sums, rows * kLanes);
    carver.take(references, rows);
    carver.take(biases, rows);
    carver.take(maxima, rows * kLanes);
  }

  /// The states from `row` on.
  RowStates from(int64_t row) const {
    return {
        sums + row, exact_sums + row * kLanes, references + row, biases + row, maxima + row * kLanes
    };
  }

  /// Sets n rows to the state of having seen no key.
  void clear(const AttentionTile& tile, int64_t n) const {
    __builtin_memset(sums, 0, sizeof(float) * n);
    __builtin_memset(exact_sums, 0, sizeof(float) * n * kLanes);
    for (int64_t row = 0; row < n; ++row) {
      references[row] = -__builtin_inff();
      biases[row] = kNoBias;
      if (tile.max_logits != nullptr) store(maxima + row * kLanes, splat(-__builtin_inff()));
    }
  }

  /// The state of a row that has seen all its keys; `factor` is SoftmaxGroup's.
  RowState finished(const AttentionTile& tile, int64_t row, float factor) const {
    const float exact_sum = reduce_add(load(exact_sums + row * kLanes));
    RowState state = {
        reference_exponent(references[row], biases[row], factor),
        kSumsByProducts ? sums[row] : exact_sum
    };
    if (wants_exact_sums(tile) && state.sum > 0) state.rounding = exact_sum / state.sum;
    if (tile.max_logits != nullptr) state.maximum = reduce_max(load(maxima + row * kLanes));
    return state;
  }
};

/// Buffers of one tile of work; rows are padded to whole groups. They take at most
/// 720 KB and, a row, what Q and O do and less than 172 bytes: 1 KB for head
/// dimension 128 in bfloat16.
template <class T>
struct AmxWorkspace {
  TileBuffers<T> tiles;
  Bfloat16* queries;        // [rows / 16][part][depth / 32][16][32]
  Bfloat16* probabilities;  // [chunks][part][64][32]
  Bfloat16* ones;           // a tile whose first column sums rows; where sums are products
  float* scores;            // [2 steps][2 key tiles][2 row tiles][16][16]
  float* product;           // [64][16]
  float* output;            // [groups][v_head_dim / 16][64][16]
  RowStates<T> states;      // [rows]
  Step* steps;              // of the packed keys
  int64_t packed;           // keys at a time
  int64_t bytes;

  AmxWorkspace(char* base, const AttentionTile& tile) {
    constexpr int kParts = TileFormat<T>::kParts;
    const int depth = round_up(tile.nope_dim + tile.rope_dim, kTileDepth);
    const int v_head_dim = tile.v_head_dim;
    packed = packed_keys<T>(depth, v_head_dim);
    const int64_t padded = round_up(tile.num_tokens * tile.group, kGroupRows);
    Carver carver{base};
    tiles.take(carver, packed, packed, depth, v_head_dim);
    carver.take(queries, padded * depth * kParts);
    carver.take(probabilities, int64_t{kAmxBlockKeys<T>} * kGroupRows * kParts);
    carver.take(ones, kTileElements);
    carver.take(scores, 2 * 4 * kTileFloats);
    carver.take(product, 4 * kTileFloats);
    carver.take(output, padded * v_head_dim);
    states.take(carver, padded);
    carver.take(steps, padded / kScoreRows * packed / kTileDepth);
    bytes = carver.used;
  }
};

}  // namespace
}  // namespace cpattn::kernels
