// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop on AMX tiles for up to 64 rows of a KV head, which is memory-bound. Keys are
// left-hand tiles, rows of memory as they are, because right-hand columns would have to be packed;
// the few scores are transposed instead. Keys, scores and probabilities of a chunk of 32 keys
// follow each other, so that the keys are still in the L1. Heads take turns with each block of
// keys.
//
// Every sum has the order of packed-inl.h, and so its bits.
#include "kernels/attention/amx/few_rows_values-inl.h"
#include "kernels/attention/amx/head_turns-inl.h"
#include "kernels/attention/amx/scores-inl.h"

namespace cpattn::kernels {
namespace {

template <class T>
class AmxFewRows {
  using Format = TileFormat<T>;
  static constexpr int kParts = Format::kParts;
  static constexpr int kBlockKeys = kAmxBlockKeys<T>;

 public:
  static int64_t scratch_bytes(const AttentionTile& tile) {
    return FewRowsWorkspace<T>(nullptr, tile).bytes;
  }

  AmxFewRows(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        rows_(tile.num_tokens * tile.group),
        row_tiles_((rows_ + kTileRows - 1) / kTileRows),
        depth_(round_up(tile.nope_dim + tile.rope_dim, kTileDepth)),
        v_dim_(tile.v_head_dim),
        work_(scratch, tile),
        pending_(work_.product),
        turns_(tile),
        packed_(
            tile, work_.tiles, depth_, row_tiles_ == 1 ? ValueOrder::kOneChunk : ValueOrder::kChunks
        ),
        values_{work_, packed_, pending_, v_dim_ / 16} {}

  bool run() {
    mark(tile_.hooks, kMarkPack);
    prepare();
    while (turns_.advance()) {
      // Between two turns no tile holds anything.
      if (should_stop(tile_.hooks)) return false;
      tiles_.configure();
      take_head(turns_.rows().head());
      attend(turns_.rows());
    }
    mark(tile_.hooks, kMarkWrite);
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      take_head(head);
      for (int row = 0; row < rows_; ++row) {
        const RowState state = states_.finished(tile_, row, group_.factor);
        finish_row(tile_, group_, row, int64_t{head} * rows_ + row, state);
      }
    }
    return true;
  }

 private:
  /// Switches to the rows of a head.
  void take_head(int head) {
    scale_ = scale_of_head(tile_, head);
    const int64_t row = int64_t{head} * kGroupRows;
    states_ = work_.states.from(row);
    group_ = states_.group(tile_, scale_, work_.output + row * v_dim_, work_.probabilities);
    queries_ = work_.queries + int64_t{head} * row_tiles_ * kTileRows * depth_ * kParts;
  }

  void prepare() {
    // Padding dimensions of the last tiles take part in all products.
    if (tile_.nope_dim + tile_.rope_dim < depth_) {
      __builtin_memset(work_.tiles.keys, 0, sizeof(Bfloat16) * kParts * 2 * kTileDepth * depth_);
    }
    fill_ones(work_.ones);
    Magnitude magnitude;
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      take_head(head);
      clear_rows();
      const int64_t elements = int64_t{row_tiles_} * kTileRows * depth_ * kParts;
      __builtin_memset(queries_, 0, sizeof(Bfloat16) * elements);
      pack_query_columns<T>(tile_, head, depth_, queries_, magnitude);
    }
    bounded_queries_ = magnitude.below(kBoundOfFiniteScores);
  }

  /// Sets the rows of the head, padded to whole tiles, to the state before the first key.
  void clear_rows() const {
    const int rows = row_tiles_ * kTileRows;
    states_.clear(tile_, rows);
    for (int d = 0; d < v_dim_ / 16; ++d) {
      __builtin_memset(group_.output + d * kGroupRows * kLanes, 0, sizeof(float) * rows * kLanes);
    }
  }

  /// Attends from the rows of the head to a block of keys. While the tiles multiply, the vector
  /// units pack the next chunk and apply softmax to the scores of the last one.
  void attend(const SourceRows<T>& rows) {
    int begin = rows.hidden() / kTileDepth * kTileDepth;
    int end = round_up(rows.count(), kTileDepth);
    drop_hidden(tile_.seen, 0, tile_.num_tokens, rows.first(), begin, end);
    const int first_chunk = begin / kTileDepth;
    const int end_chunk = end / kTileDepth;
    if (first_chunk >= end_chunk) return turns_.fetch_rest();
    group_.first_chunk = first_chunk;
    packed_.begin(rows);
    if (has_factors(tile_.codes.k_factors))
      rows.read_row_factors(tile_.codes.k_factors, k_factors_);
    moderate_factors_ =
        !has_factors(tile_.codes.k_factors) || are_moderate(k_factors_, rows.count());
    const int64_t flops = int64_t{2} * rows_ * (end_chunk - first_chunk) * kTileDepth;
    mark(tile_.hooks, kMarkQk, flops * (tile_.nope_dim + tile_.rope_dim));
    float references[kTileRows];
    start_scores(rows, first_chunk);
    for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
      if (chunk + 1 < end_chunk) {
        start_scores(rows, chunk + 1);
      } else {
        pending_.flush();
      }
      packed_.pack_values(rows, chunk, [&] { turns_.fetch(1); });
      turns_.fetch(8);
      take_softmax(rows.first(), chunk);
      turns_.fetch(8);
      if (row_tiles_ > 1) continue;
      if (chunk == first_chunk) {
        __builtin_memcpy(references, group_.references, sizeof references);
      }
      pending_.flush();
      values_.add_chunk(group_, chunk, chunk == first_chunk);
    }
    turns_.fetch_rest();
    mark(tile_.hooks, kMarkPv, flops * v_dim_);
    if (row_tiles_ == 1) {
      // Raising a reference changed the probabilities of earlier chunks.
      if (__builtin_memcmp(references, group_.references, sizeof references) != 0) {
        values_.add_chunks_again(group_, rows, first_chunk, end_chunk);
      }
      values_.add_block(group_);
    } else {
      values_.add_values(group_, row_tiles_, first_chunk, end_chunk);
    }
    for (int i = 0; i < packed_.num_special(); ++i) {
      add_special_value(
          tile_, group_, 0, rows_, rows.first(), packed_.special_key(i), packed_.special_value(i)
      );
    }
  }

  /// Packs the keys of a chunk and starts their scores.
  void start_scores(const SourceRows<T>& rows, int chunk) {
    Bfloat16* keys = packed_.keys_of(chunk % 2);
    packed_.template pack_keys<KeySide::kLeft>(rows, chunk, keys, [&] { turns_.fetch(1); });
    const auto no_slice = [] {};
    for (int row = 0; row < rows_; row += kScoreRows) {
      const Bfloat16* queries = queries_ + int64_t{row} * depth_ * kParts;
      float* scores = scores_of(chunk, row);
      if (rows_ - row > kTileRows) {
        multiply_queries<KeySide::kLeft, kParts, 2>(
            queries, keys, depth_, pending_, scores, no_slice, no_slice
        );
      } else {
        multiply_queries<KeySide::kLeft, kParts, 1>(
            queries, keys, depth_, pending_, scores, no_slice, no_slice
        );
      }
    }
  }

  float* scores_of(int chunk, int row) const {
    return work_.scores + (chunk % 2 * 2 + row / kScoreRows) * 4 * kTileFloats;
  }

  /// Turns the scores of a chunk into probabilities.
  void take_softmax(int64_t first, int chunk) {
    const bool factors = has_factors(tile_.codes.k_factors);
    for (int row = 0; row < rows_; row += kScoreRows) {
      const Step step{
          .row = row,
          .count = static_cast<int>(smaller(kScoreRows, rows_ - row)),
          .chunk = chunk,
          .first_chunk = group_.first_chunk,
          .end_chunk = chunk + 1,
          .last = false,
      };
      float* scores = scores_of(chunk, row);
      transpose_scores(step.count, scores);
      prepare_scores<T>(
          tile_, step, first, scale_, factors ? k_factors_ + chunk * kTileDepth : nullptr,
          !moderate_factors_ || !bounded_queries_ || !packed_.bounded(), states_.from(row).maxima,
          scores
      );
      StepRows<T>(group_, step, scores).take_rest();
    }
  }

  const TileScope tiles_;
  const AttentionTile& tile_;
  const int rows_;  // of a head
  const int row_tiles_;
  const int depth_;
  const int v_dim_;
  const FewRowsWorkspace<T> work_;
  PendingSums pending_;
  HeadTurns<T, kBlockKeys> turns_;
  TileRows<T> packed_;
  FewRowsValues<T> values_;
  bool bounded_queries_ = false;
  bool moderate_factors_ = true;
  float scale_ = 0;  // of the head at work, as the members below
  SoftmaxGroup<T> group_{};
  RowStates<T> states_{};
  Bfloat16* queries_ = nullptr;
  float k_factors_[kMaxPackedKeys];
};

}  // namespace
}  // namespace cpattn::kernels
