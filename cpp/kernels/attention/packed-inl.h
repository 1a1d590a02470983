// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop: for each block of keys, pack K and V once, then run Q K^T, softmax and P V
// for a few query rows at a time, one chunk of the block after the other, while the scores stay in
// L1. Needs the vector layer and an engine included first.
//
// Blocks and chunks start at multiples of their length from key 0 for any part of a sequence, so a
// row's result does not depend on its neighbours.
#include "kernels/attention/key_block-inl.h"
#include "kernels/softmax/results-inl.h"
#include "kernels/softmax/score_bias-inl.h"
#include "kernels/softmax/softmax-inl.h"
#include "kernels/vector/scratch-inl.h"

namespace cpattn::kernels {
namespace {

/// Rows that go through the three steps together.
constexpr int kRowGroup = 24;
/// Limit of packed K and V of a block, half of a 1 MB L2.
constexpr int kBlockBytes = 512 * 1024;
/// Keys whose scores are computed at a time.
constexpr int kMaxChunkKeys = 256;

constexpr int64_t groups_of(int64_t rows) { return (rows + kRowGroup - 1) / kRowGroup; }

/// Keys of one block: up to kMaxBlockKeys, fewer for wide rows.
template <class Engine>
int block_keys(int qk_dim, int v_head_dim) {
  int keys = kMaxBlockKeys;
  const int row_bytes = (qk_dim + v_head_dim) * static_cast<int>(sizeof(typename Engine::Operand));
  while (keys > 64 && keys * row_bytes > kBlockBytes) keys /= 2;
  return keys;
}

/// Buffers of one tile.
template <class Engine, int kParts>
struct PackedWorkspace {
  using Operand = typename Engine::Operand;
  Operand* queries;  // [rows][qk_dim]
  Operand* keys;     // panels of KeyBlock
  Operand* values;
  Operand* expanded;       // [kKeyGranule][qk_dim + v_head_dim]
  Operand* probabilities;  // [kRowGroup][kParts][kMaxChunkKeys]
  float* scores;           // [kRowGroup][kMaxChunkKeys]
  float* output;           // [rows][v_head_dim]
  float* zeros;            // [v_head_dim]
  RowState* states;        // [rows]
  bool* started;           // [heads][row groups], whether output and states are set
  int64_t bytes;

  PackedWorkspace(char* base, int64_t heads, int64_t head_rows, int qk_dim, int v_head_dim) {
    const int64_t rows = heads * head_rows;
    const int64_t block = block_keys<Engine>(qk_dim, v_head_dim);
    Carver carver{base};
    carver.take(queries, rows * qk_dim);
    carver.take(keys, int64_t{round_up(block, kPanel)} * qk_dim);
    carver.take(values, block * round_up(v_head_dim, kPanel));
    carver.take(expanded, int64_t{kKeyGranule} * (qk_dim + v_head_dim));
    carver.take(probabilities, kRowGroup * kParts * kMaxChunkKeys);
    carver.take(scores, kRowGroup * kMaxChunkKeys);
    carver.take(output, rows * v_head_dim);
    carver.take(zeros, v_head_dim);
    carver.take(states, rows);
    carver.take(started, heads * groups_of(head_rows));
    bytes = carver.used;
  }
};

/// Weights have kParts parts: 1, which rounds them to operands, or kWeightParts.
template <class T, class Engine, int kExp2Degree, int kParts = 1>
class PackedLoop {
  static_assert(MatrixEngine<Engine, T>);
  using Operand = typename Engine::Operand;
  using Workspace = PackedWorkspace<Engine, kParts>;
  static constexpr int kWeightStride = kParts * kMaxChunkKeys;  // from one row to the next

 public:
  static int64_t scratch_bytes(const AttentionTile* tile) {
    return Workspace(
               nullptr, tile->num_kv_heads, tile->num_tokens * tile->group,
               tile->nope_dim + tile->rope_dim, tile->v_head_dim
    )
        .bytes;
  }

  static bool run(const AttentionTile* tile, void* scratch) {
    return PackedLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  PackedLoop(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        head_rows_(tile.num_tokens * tile.group),
        qk_dim_(tile.nope_dim + tile.rope_dim),
        v_dim_(tile.v_head_dim),
        block_keys_(block_keys<Engine>(qk_dim_, v_dim_)),
        work_(scratch, tile.num_kv_heads, head_rows_, qk_dim_, v_dim_),
        block_(tile, block_keys_, work_.keys, work_.values, work_.expanded, work_.zeros) {}

  bool run() {
    mark(tile_.hooks, kMarkPack);
    prepare_rows();
    const auto [begin, end] = keys_of_tile(tile_);
    if (begin >= end) return finish();
    for (int64_t first = begin / block_keys_ * block_keys_; first < end; first += block_keys_) {
      if (should_stop(tile_.hooks)) return false;
      const int n = static_cast<int>(smaller(block_keys_, end - first));
      if (!any_shown(tile_.seen, 0, tile_.num_tokens, first, n)) continue;
      const int hidden = static_cast<int>(larger(0, begin - first));
      for (head_ = 0; head_ < tile_.num_kv_heads; ++head_) {
        mark(tile_.hooks, kMarkPack);
        block_.pack(head_, first, n, hidden, end);
        attend_block(n);
      }
    }
    return finish();
  }

  /// Attends from the rows of a head to the n keys of the block.
  void attend_block(int n) {
    for (int row = 0; row < head_rows_; row += kRowGroup) {
      const int count = static_cast<int>(smaller(kRowGroup, head_rows_ - row));
      for (int key = 0; key < n; key += kMaxChunkKeys) {
        attend(row, count, key, static_cast<int>(smaller(kMaxChunkKeys, n - key)));
      }
    }
  }

  /// Prepares Q for the engine: in the caller's memory, if rows are at equal distances there, or
  /// packed.
  void prepare_queries() {
    constexpr int kTokensAhead = 8;
    if constexpr (Engine::template kTakesQueries<T>) {
      if (tile_.rope_dim == 0 && !is_padded(tile_) &&
          (tile_.num_tokens == 1 || tile_.q.token_stride == tile_.group * tile_.q.head_stride)) {
        queries_ = static_cast<const Operand*>(tile_.q.data);
        query_stride_ = tile_.q.head_stride;
        head_queries_ = tile_.group * tile_.q.head_stride;
        return;
      }
    }
    queries_ = work_.queries;
    query_stride_ = qk_dim_;
    head_queries_ = int64_t{head_rows_} * qk_dim_;
    const auto pack = [&](const HeadRows<const void>& source, int stored, int dim,
                          Operand* packed) {
      const int64_t rows = int64_t{tile_.num_kv_heads} * head_rows_;
      for (int64_t row = 0; row < rows; ++row, packed += qk_dim_) {
        const auto [token, head, kv_head] = row_place(tile_, row);
        const auto* q = row_at<const T>(source, token, head);
        if (token + kTokensAhead < tile_.num_tokens) {
          fetch_row<2>(q + kTokensAhead * source.token_stride, dim * sizeof(T));
        }
        pack_padded_query<Engine>(tile_, q, stored, dim, packed);
      }
    };
    pack(tile_.q, tile_.stored.nope_dim, tile_.nope_dim, work_.queries);
    if (tile_.rope_dim > 0) {
      Operand* packed = work_.queries + tile_.nope_dim;
      pack(tile_.q_rope, tile_.stored.rope_dim, tile_.rope_dim, packed);
    }
  }

  void prepare_rows() {
    prepare_queries();
    const int rows = tile_.num_kv_heads * head_rows_;
    for (int row = 0; row < rows; ++row) work_.states[row] = {};
    __builtin_memset(work_.started, 0, tile_.num_kv_heads * groups_of(head_rows_));
    __builtin_memset(work_.zeros, 0, sizeof(float) * v_dim_);
  }

  /// The query head of a row of the KV head.
  int64_t head_of(int row) const { return int64_t{head_} * tile_.group + row % tile_.group; }

  /// Whether O and states of rows [row, row + kRowGroup) of a head are set.
  bool& started(int head, int row) const {
    return work_.started[head * groups_of(head_rows_) + row / kRowGroup];
  }

  /// Attends from rows [row, row + count) of the head to n keys of the block from `chunk` on.
  void attend(int row, int count, int chunk, int n) {
    const int64_t first_token = row / tile_.group;
    const int64_t end_token = (row + count - 1) / tile_.group + 1;
    const int64_t first = block_.first() + chunk;
    const KeyRange seen_first = visible_keys(tile_.seen, first_token);
    const KeyRange seen_last = visible_keys(tile_.seen, end_token - 1);
    int begin = static_cast<int>(larger(0, seen_first.begin - first)) / kKeyGranule * kKeyGranule;
    int end = round_up(static_cast<int>(smaller(n, seen_last.end - first)), kKeyGranule);
    drop_hidden(tile_.seen, first_token, end_token, first, begin, end);
    if (begin >= end || (bias_may_hide(tile_) && hidden_by_biases(row, count, first, begin, end))) {
      return;
    }

    const int64_t flops_per_dim = int64_t{2} * count * (end - begin);
    mark(tile_.hooks, kMarkQk, flops_per_dim * qk_dim_);
    multiply_panels<Engine, false>(
        count, queries_ + head_ * head_queries_ + row * query_stride_, query_stride_,
        block_.keys() + chunk / kPanel * block_.keys_panel(), block_.keys_panel(), 0, qk_dim_,
        begin, end, work_.scores, kMaxChunkKeys
    );
    mark(tile_.hooks, kMarkSoftmax);
    const bool all_visible = tile_.seen.mask == nullptr && seen_first.end - first >= end &&
                             seen_last.begin - first <= begin;
    const float scale = scale_of_head(tile_, head_);
    const float factor = scale_in_softmax(tile_, head_) * kLog2E;
    const float* key_factors = block_.k_factors();
    const int64_t head_row = int64_t{head_} * head_rows_ + row;
    float* output = work_.output + head_row * v_dim_;
    for (int i = 0; i < count; ++i) {
      float* scores = work_.scores + int64_t{i} * kMaxChunkKeys;
      if (key_factors != nullptr) multiply_row(scores, key_factors + chunk, begin, end);
      finish_scores(tile_, scores, head_, row + i, scale, first, begin, end, all_visible);
      softmax_row<kExp2Degree>(
          scores, weights_at<kParts>(weights_of(i), kMaxChunkKeys), begin, end, factor,
          work_.states[head_row + i], output + int64_t{i} * v_dim_, v_dim_
      );
    }
    mark(tile_.hooks, kMarkPv, flops_per_dim * v_dim_);
    for (int part = 0; part < kParts; ++part) {
      const auto add_values =
          started(head_, row) ? &multiply_panels<Engine, true> : &multiply_panels<Engine, false>;
      started(head_, row) = true;
      add_values(
          count, work_.probabilities + part * kMaxChunkKeys + begin, kWeightStride, block_.values(),
          block_.values_panel(), chunk + begin, end - begin, 0, v_dim_, output, v_dim_
      );
    }
    for (int i = 0; i < block_.num_special(); ++i) {
      const int key = block_.special_key(i) - chunk;
      if (key >= 0 && key < n) {
        add_special_value(row, count, first, key, block_.special_value(i), output);
      }
    }
  }

  /// The weights of a row of the group, part after part.
  Operand* weights_of(int row) const { return work_.probabilities + int64_t{row} * kWeightStride; }

  /// Whether biases hide the keys of a chunk from rows [row, row + count) of the head. For other
  /// chunks the first keys of the first row tell.
  bool hidden_by_biases(int row, int count, int64_t first, int begin, int end) const {
    for (int i = row; i < row + count; ++i) {
      if (!biases_hide(tile_, i / tile_.group, head_of(i), first, begin, end)) {
        return false;
      }
    }
    return true;
  }

  /// O += P V for a key that was packed as zeros, in the rows that see it.
  [[gnu::noinline]] void add_special_value(
      int row, int count, int64_t first, int key, const T* value, float* output
  ) const {
    for (int i = 0; i < count; ++i, output += v_dim_) {
      if (!sees(tile_, (row + i) / tile_.group, head_of(row + i), first + key)) continue;
      const Vector p = splat(weight_of<Engine, kParts>(weights_of(i) + key, kMaxChunkKeys));
      for (int d = 0; d < v_dim_; d += kLanes) {
        store(output + d, fma(p, load(value + d), load(output + d)));
      }
    }
  }

  /// Normalises all rows and writes them.
  bool finish() const {
    mark(tile_.hooks, kMarkWrite);
    const int rows = tile_.num_kv_heads * head_rows_;
    for (int row = 0; row < rows; ++row) {
      const bool any = started(row / head_rows_, row % head_rows_);
      finish_row<T>(
          tile_, row, work_.states[row], any ? work_.output + int64_t{row} * v_dim_ : work_.zeros
      );
    }
    return true;
  }

  const AttentionTile& tile_;
  const int head_rows_;  // of one KV head
  const int qk_dim_;
  const int v_dim_;
  const int block_keys_;
  const Workspace work_;
  const Operand* queries_ = nullptr;
  int64_t query_stride_ = 0;  // of the rows of a head
  int64_t head_queries_ = 0;  // from one head to the next
  int head_ = 0;              // at work
  KeyBlock<T, Engine> block_;
};

}  // namespace
}  // namespace cpattn::kernels
