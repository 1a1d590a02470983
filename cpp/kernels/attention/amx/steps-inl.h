// SPDX-License-Identifier: Apache-2.0
#pragma once

// The steps in which rows meet the keys of a block, and their softmax in slices between products.
// Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/softmax-inl.h"
#include "kernels/engines/amx/products-inl.h"
#include "kernels/rows/visibility-inl.h"

namespace cpattn::kernels {
namespace {

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
    const int64_t seen_from = visible_keys(tile.seen, group / tile.group).begin - first;
    const int64_t seen_to = visible_keys(tile.seen, (end - 1) / tile.group).end - first;
    int begin_key = static_cast<int>(larger(0, smaller(n, seen_from))) / kTileDepth * kTileDepth;
    int end_key = round_up(static_cast<int>(larger(0, smaller(n, seen_to))), kTileDepth);
    drop_hidden(
        tile.seen, group / tile.group, (end - 1) / tile.group + 1, first, begin_key, end_key
    );
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

/// The softmax of the rows of a step, in slices. Everything is inlined, so that its members stay in
/// registers although assembly between slices may change memory.
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

  /// Takes the next kRows rows: 1, 2 or 4. Padding rows after the last may hold anything.
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

}  // namespace
}  // namespace cpattn::kernels
