// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop on AMX tiles, for bfloat16 and, in two parts, float16: pack K and V of a few
// blocks of keys, then process 64 rows at a time: for each block Q K^T and softmax, in steps of 32
// rows and 32 keys, then P V. Tiles and vector units work on different steps at the same time.
//
// Few rows have their own loop (few_rows-inl.h), with the same bits.
//
// Blocks of kAmxBlockKeys keys, in chunks of 32, begin at fixed positions of the sequence, as in
// attention/packed-inl.h, so that a row's bits do not depend on which rows it is
// computed with.
#include "kernels/attention/amx/packed_workspace-inl.h"
#include "kernels/attention/amx/pending-inl.h"
#include "kernels/attention/amx/scores-inl.h"
#include "kernels/attention/amx/tile_rows-inl.h"

namespace cpattn::kernels {
namespace {

template <class T>
class AmxPacked {
  using Format = TileFormat<T>;
  using Workspace = AmxPackedWorkspace<T>;
  static constexpr int kParts = Format::kParts;
  static constexpr int kBlockKeys = kAmxBlockKeys<T>;
  static constexpr int kChunks = kAmxChunks<T>;

 public:
  static int64_t scratch_bytes(const AttentionTile& tile) { return Workspace(nullptr, tile).bytes; }

  /// `head` is the KV head.
  AmxPacked(const AttentionTile& tile, int head, char* scratch)
      : tile_(tile),
        head_(head),
        rows_(tile.num_tokens * tile.group),
        depth_(round_up(tile.nope_dim + tile.rope_dim, kTileDepth)),
        v_dim_(tile.v_head_dim),
        scale_(scale_of_head(tile, head)),
        work_(scratch, tile),
        pending_(work_.product),
        next_(tile),
        packed_(tile, work_.tiles, depth_, ValueOrder::kColumns) {}

  bool run() {
    mark(tile_.hooks, kMarkPack);
    prepare();
    const auto [begin, end] = keys_of_tile(tile_);
    locate_keys(begin / kBlockKeys * kBlockKeys, begin, end);
    while (next_.count() > 0) {
      // Tiles are empty between two calls of attend().
      if (should_stop(tile_.hooks)) return false;
      tiles_.configure();
      const int64_t first = next_.first();
      const int n = next_.count();
      if (!any_shown(tile_.seen, 0, tile_.num_tokens, first, n)) {
        locate_keys(first + n, begin, end);
        continue;
      }
      mark(tile_.hooks, kMarkPack);
      packed_.pack(next_);
      if (has_factors(tile_.codes.k_factors))
        next_.read_row_factors(tile_.codes.k_factors, k_factors_);
      moderate_factors_ = !has_factors(tile_.codes.k_factors) || are_moderate(k_factors_, n);
      locate_keys(first + n, begin, end);
      attend(first, n);
    }
    mark(tile_.hooks, kMarkWrite);
    for (int row = 0; row < rows_; ++row) {
      const SoftmaxGroup<T> group = group_of(row);
      const int i = row % kGroupRows;
      const RowState state = work_.states.finished(tile_, row, group.factor);
      finish_row(tile_, group, i, int64_t{head_} * rows_ + row, state);
    }
    return true;
  }

 private:
  void prepare() {
    const int qk_dim = tile_.nope_dim + tile_.rope_dim;
    constexpr int64_t kElementBytes = sizeof(Bfloat16) * kParts;
    const int64_t padded = round_up(rows_, kGroupRows);
    // Padding rows and dimensions of the last tiles take part in all products.
    __builtin_memset(work_.queries, 0, kElementBytes * padded * depth_);
    if (qk_dim < depth_)
      __builtin_memset(work_.tiles.keys, 0, kElementBytes * work_.packed * depth_);
    work_.states.clear(tile_, padded);
    __builtin_memset(work_.output, 0, sizeof(float) * padded * v_dim_);
    fill_ones(work_.ones);
    pack_queries();
  }

  void pack_queries() {
    Magnitude magnitude;
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = row / tile_.group;
      const int64_t head = int64_t{head_} * tile_.group + row % tile_.group;
      Bfloat16* tiles = queries_of(row);
      const int place = row % kTileRows;
      const auto* q = row_at<const T>(tile_.q, token, head);
      pack_tile_row(q, tile_.nope_dim, 0, place, depth_, tiles, magnitude);
      if (tile_.rope_dim > 0) {
        const auto* rope = row_at<const T>(tile_.q_rope, token, head);
        pack_tile_row(rope, tile_.rope_dim, tile_.nope_dim, place, depth_, tiles, magnitude);
      }
    }
    bounded_queries_ = magnitude.below(kBoundOfFiniteScores);
  }

  /// The tiles of the sixteen rows with `row`.
  Bfloat16* queries_of(int row) const {
    return work_.queries + int64_t{row / kTileRows} * kTileRows * depth_ * kParts;
  }

  /// Locates the next keys to pack: those from `first` on within [begin, end).
  void locate_keys(int64_t first, int64_t begin, int64_t end) {
    const int n = begin < end ? static_cast<int>(larger(0, smaller(work_.packed, end - first))) : 0;
    next_.locate(head_, first, n, n == 0 ? 0 : static_cast<int>(larger(0, begin - first)));
  }

  /// Attends from all rows to keys [first, first + n), which are packed; next_ has the keys after
  /// them. While the tiles compute the scores of a step, the vector units apply softmax to those of
  /// the step two before.
  void attend(int64_t first, int n) {
    const int steps = plan_steps<T>(tile_, rows_, first, n, work_.steps);
    const auto no_slice = [] {};
    for (int i = 0; i < 2 && i < steps; ++i) start_scores(i, no_slice, no_slice);
    for (int i = 0; i < steps; ++i) {
      const Step& step = work_.steps[i];
      if (step.first()) {
        mark(tile_.hooks, kMarkQk, flops_per_dim(step) * (tile_.nope_dim + tile_.rope_dim));
      }
      next_.fetch(share_of(next_.count(), steps));
      if (i + 2 >= steps) add_pending();
      float* scores = scores_of(i);
      const bool factors = has_factors(tile_.codes.k_factors);
      prepare_scores<T>(
          tile_, step, first, scale_, factors ? k_factors_ + step.chunk * kTileDepth : nullptr,
          !moderate_factors_ || !bounded_queries_ || !packed_.bounded(),
          work_.states.from(step.row).maxima, scores
      );
      const SoftmaxGroup<T> softmax = softmax_of(step);
      StepRows<T> rows(softmax, step, scores);
      if (i + 2 < steps) {
        start_scores_beside(i + 2, rows);
      } else {
        rows.take_rest();
      }
      if (step.last) {
        mark(tile_.hooks, kMarkPv, flops_per_dim(step) * v_dim_);
        add_values(step, first);
      }
    }
    add_pending();
  }

  /// Starts scores with the rows of another step in the slices.
  void start_scores_beside(int index, const StepRows<T>& rows) {
    const int products = products_of(work_.steps[index]);
    if (sum_.count > 0) {
      start_scores_beside_sum(index, rows);
    } else if (rows.count() <= products) {
      start_scores_beside<1>(index, rows);
    } else if (rows.count() <= 2 * products) {
      start_scores_beside<2>(index, rows);
    } else {
      start_scores_beside<4>(index, rows);
    }
  }

  template <int kRows>
  void start_scores_beside(int index, StepRows<T> rows) {
    const auto slice = [&]() __attribute__((always_inline)) { rows.template take<kRows>(); };
    start_scores(index, slice, slice);
    rows.take_rest();
  }

  /// Pending sums are added to O first, because raising a reference rescales O.
  void start_scores_beside_sum(int index, StepRows<T> rows) {
    PendingRows sum = sum_;
    start_scores(
        index, [&]() __attribute__((always_inline)) { sum.take<kTileRows>(); },
        [&]() __attribute__((always_inline)) { rows.template take<2>(); }
    );
    rows.take_rest();
    sum_.count = 0;
  }

  /// Waits for the last products.
  void add_pending() {
    pending_.flush();
    sum_.take_rest();
  }

  float* scores_of(int step) const { return work_.scores + step % 2 * 4 * kTileFloats; }

  /// Flops per dimension of the product of a group of rows with all keys that it sees in a block.
  /// Scores are started two steps ahead and softmax runs beside them: a trace shows both as QK.
  int64_t flops_per_dim(const Step& step) const {
    const int64_t rows = smaller(kGroupRows, rows_ - step.row / kGroupRows * kGroupRows);
    return 2 * rows * (step.end_chunk - step.first_chunk) * kTileDepth;
  }

  int products_of(const Step& step) const {
    return depth_ / kTileDepth * Format::kProducts * (step.count > kTileRows ? 4 : 2);
  }

  /// The part of `work` that each of `slices` slices takes.
  static int share_of(int work, int slices) { return (work + slices - 1) / slices; }

  template <class FirstSlice, class Slice>
  [[gnu::always_inline]] void start_scores(int index, FirstSlice first_slice, Slice slice) {
    const Step& step = work_.steps[index];
    const Bfloat16* queries = queries_of(step.row);
    const Bfloat16* keys = work_.tiles.keys + int64_t{step.chunk} * kTileDepth * depth_ * kParts;
    if (step.count > kTileRows) {
      multiply_queries<KeySide::kRight, kParts, 2>(
          queries, keys, depth_, pending_, scores_of(index), first_slice, slice
      );
    } else {
      multiply_queries<KeySide::kRight, kParts, 1>(
          queries, keys, depth_, pending_, scores_of(index), first_slice, slice
      );
    }
  }

  /// The softmax of the group of 64 rows with `row`.
  SoftmaxGroup<T> group_of(int row) const {
    const int64_t first = row / kGroupRows * kGroupRows;
    float* output = work_.output + first * v_dim_;
    return work_.states.from(first).group(tile_, scale_, output, work_.probabilities);
  }

  SoftmaxGroup<T> softmax_of(const Step& step) const {
    SoftmaxGroup<T> softmax = group_of(step.row);
    softmax.first_chunk = step.first_chunk;
    return softmax;
  }

  /// O += P V for the group of rows that ends with this step.
  void add_values(const Step& step, int64_t first) {
    const int count = step.row % kGroupRows + step.count;
    switch ((count + kTileRows - 1) / kTileRows) {
      case 1:
        add_values<1>(step);
        break;
      case 2:
        add_values<2>(step);
        break;
      case 3:
        add_values<3>(step);
        break;
      default:
        add_values<4>(step);
    }
    if (packed_.num_special() == 0) return;
    add_pending();
    for (int i = 0; i < packed_.num_special(); ++i) {
      const int key = packed_.special_key(i);
      if (key / kBlockKeys == step.chunk / kChunks) {
        const int row = step.row / kGroupRows * kGroupRows;
        add_special_value(
            tile_, softmax_of(step), row, count, first, key, packed_.special_value(i)
        );
      }
    }
  }

  /// The sums start at zero, and vector adds between the products bring them to O one column tile
  /// later: reading O into the tiles would wait for their stores.
  template <int kRowTiles>
  void add_values(const Step& step) {
    const int chunks = step.chunk + 1 - step.first_chunk;
    const SoftmaxGroup<T> softmax = softmax_of(step);
    const Bfloat16* p = softmax.probabilities_of(0, step.first_chunk);
    const Bfloat16* values = packed_.values_of(step.first_chunk);
    float* output = softmax.output;
    constexpr int kRows = kRowTiles * kTileRows;
    constexpr int64_t kChunkElements = int64_t{kParts} * kTileElements;
    const auto multiply = [&](const Bfloat16* columns, int64_t stride, auto& pending_sum) {
      multiply_values<Format, kRowTiles>(
          p, columns, stride, chunks, pending_, work_.product,
          [&]() __attribute__((always_inline)) { pending_sum.template take<4>(); }
      );
      pending_sum.take_rest();
    };
    PendingRows sum = {};
    int d = 0;
    if constexpr (Format::kSumsByProducts) {
      multiply(work_.ones, 0, sum);
      PendingColumn row_sums = {work_.product, softmax.sums, kRows};
      multiply(values, kChunkElements, row_sums);
      d = 16;
    }
    for (; d < v_dim_; d += 16) {
      if (d > 0) sum = {work_.product, output + (d / 16 - 1) * kGroupRows * kLanes, kRows};
      multiply(values + d / 16 * kChunks * kChunkElements, kChunkElements, sum);
    }
    sum_ = {work_.product, output + (d / 16 - 1) * kGroupRows * kLanes, kRows};
  }

  const TileScope tiles_;
  const AttentionTile& tile_;
  const int head_;
  const int rows_;
  const int depth_;  // of the products Q K^T: qk_dim, padded to whole tiles
  const int v_dim_;
  const float scale_;
  const Workspace work_;
  bool bounded_queries_ = false;
  bool moderate_factors_ = true;
  PendingSums pending_;
  PendingRows sum_ = {};
  SourceRows<T> next_;
  TileRows<T> packed_;
  float k_factors_[kMaxPackedKeys];
};

}  // namespace
}  // namespace cpattn::kernels
