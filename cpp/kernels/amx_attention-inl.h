// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop on AMX tiles, for bfloat16: for each block of keys, pack K
// and V once, then take 64 rows at a time through Q K^T and softmax, in steps of
// 32 rows and 32 keys, and through P V. Tiles and vector units work at the same
// time, on different steps.
//
// As in attention-inl.h everything happens at fixed positions of the sequence,
// blocks of 256 keys in chunks of 32, so that a row's bits do not depend on
// which rows it is computed with.
#include "kernels/amx_steps-inl.h"

namespace cpattn::kernels {
namespace {

class AmxAttention {
 public:
  static int64_t scratch_bytes(int64_t rows, int32_t qk_dim, int32_t v_head_dim) {
    return AmxWorkspace(nullptr, rows, round_up(qk_dim, kTileDepth), v_head_dim).bytes;
  }

  static bool run(const AttentionTile* tile, void* scratch) {
    const TileScope tiles;
    return AmxAttention(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  AmxAttention(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        rows_(tile.num_tokens * tile.group),
        depth_(round_up(tile.head_dim + tile.rope_dim, kTileDepth)),
        v_dim_(tile.v_head_dim),
        factor_(tile.softcap > 0 ? kLog2E : tile.scale * kLog2E),
        work_(scratch, rows_, depth_, v_dim_),
        pending_(work_.product),
        block_(tile) {}

  bool run() {
    mark(tile_, kMarkPack);
    prepare();
    const int64_t begin = visible_keys(tile_, 0).begin;
    const int64_t end = visible_keys(tile_, tile_.num_tokens - 1).end;
    locate_block(begin / kAmxBlockKeys * kAmxBlockKeys, begin, end);
    while (block_.count() > 0) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      const int64_t first = block_.first();
      const int n = block_.count();
      mark(tile_, kMarkPack);
      pack_block();
      locate_block(first + n, begin, end);
      attend(first, n);
    }
    mark(tile_, kMarkWrite);
    for (int row = 0; row < rows_; ++row) finish(row);
    return true;
  }

  void prepare() const {
    const int qk_dim = tile_.head_dim + tile_.rope_dim;
    if (qk_dim < depth_) {  // the dimensions that fill up the last tile
      __builtin_memset(work_.queries, 0, sizeof(Bfloat16) * round_up(rows_, kGroupRows) * depth_);
      __builtin_memset(work_.keys, 0, sizeof(Bfloat16) * kAmxBlockKeys * depth_);
    }
    for (int row = 0; row < rows_; ++row) {
      const int64_t token = row / tile_.group;
      const int64_t head = row % tile_.group;
      Bfloat16* tiles = work_.queries + int64_t{row / kTileRows} * kTileRows * depth_;
      const auto* q = static_cast<const Bfloat16*>(tile_.q) + token * tile_.q_token_stride +
                      head * tile_.q_head_stride;
      pack_tile_row(q, tile_.head_dim, 0, row % kTileRows, tiles);
      if (tile_.rope_dim > 0) {
        const auto* rope = static_cast<const Bfloat16*>(tile_.q_rope) +
                           token * tile_.q_rope_token_stride + head * tile_.q_rope_head_stride;
        pack_tile_row(rope, tile_.rope_dim, tile_.head_dim, row % kTileRows, tiles);
      }
      work_.references[row] = -__builtin_inff();
    }
    const int64_t padded = round_up(rows_, kGroupRows);
    __builtin_memset(work_.sums, 0, sizeof(float) * padded * kLanes);
    __builtin_memset(work_.output, 0, sizeof(float) * padded * v_dim_);
    __builtin_memset(work_.zeros, 0, sizeof(Bfloat16) * v_dim_);
  }

  /// The block of keys from `first` on, as far as keys [begin, end) are in it.
  void locate_block(int64_t first, int64_t begin, int64_t end) {
    const int n =
        begin < end ? static_cast<int>(larger(0, smaller(kAmxBlockKeys, end - first))) : 0;
    block_.locate(first, n, n == 0 ? 0 : static_cast<int>(larger(0, begin - first)));
  }

  void pack_block() {
    const int n = block_.count();
    pack_tile_keys(block_.k, n, tile_.head_dim, 0, depth_, work_.keys);
    if (tile_.rope_dim > 0) {
      pack_tile_keys(block_.k_rope, n, tile_.rope_dim, tile_.head_dim, depth_, work_.keys);
    }
    num_special_ = pack_tile_values(block_.v, n, v_dim_, work_.values, special_keys_);
    if (num_special_ == 0) return;
    // Zero times an infinity is NaN, so such values must not meet the rows that
    // do not see them: zeros stand in for them, and add_special_value adds them.
    for (int i = 0; i < num_special_; ++i) {
      const char*& row = block_.v[special_keys_[i]];
      special_values_[i] = reinterpret_cast<const Bfloat16*>(row);
      row = reinterpret_cast<const char*>(work_.zeros);
    }
    int still_special[kAmxBlockKeys];
    pack_tile_values(block_.v, n, v_dim_, work_.values, still_special);
  }

  /// Lists the steps of a block, one group of rows after the other; gives their number.
  int plan_block(int64_t first, int n) {
    int steps = 0;
    for (int group = 0; group < rows_; group += kGroupRows) {
      const int end = static_cast<int>(smaller(group + kGroupRows, rows_));
      const int64_t seen_from = visible_keys(tile_, group / tile_.group).begin - first;
      const int64_t seen_to = visible_keys(tile_, (end - 1) / tile_.group).end - first;
      const int first_chunk = static_cast<int>(larger(0, smaller(n, seen_from))) / kTileDepth;
      const int end_chunk =
          round_up(static_cast<int>(larger(0, smaller(n, seen_to))), kTileDepth) / kTileDepth;
      for (int chunk = first_chunk; chunk < end_chunk; ++chunk) {
        for (int row = group; row < end; row += kScoreRows) {
          const int count = static_cast<int>(smaller(kScoreRows, end - row));
          const bool last = chunk + 1 == end_chunk && row + count == end;
          work_.steps[steps++] = {row, count, chunk, first_chunk, end_chunk, last};
        }
      }
    }
    return steps;
  }

  /// All rows against keys [first, first + n), which are packed; block_ is the
  /// next block already. While the tiles compute the scores of a step, the vector
  /// units take those of the step two before through softmax.
  void attend(int64_t first, int n) {
    const int steps = plan_block(first, n);
    for (int i = 0; i < 2 && i < steps; ++i) start_scores(i, [] {});
    for (int i = 0; i < steps; ++i) {
      const Step& step = work_.steps[i];
      const bool starts_group = step.chunk == step.first_chunk && step.row % kGroupRows == 0;
      if (starts_group)
        mark(tile_, kMarkQk, flops_per_dim(step) * (tile_.head_dim + tile_.rope_dim));
      block_.fetch(share_of(block_.count(), steps));
      if (i + 2 >= steps) pending_.flush();
      restrict_scores(step, first, scores_of(i));
      StepRows rows = {softmax_of(step), scores_of(i), step};
      if (i + 2 < steps) {
        const int share = share_of(step.count, products_of(work_.steps[i + 2]));
        start_scores(i + 2, [&] { rows.take(share); });
      }
      rows.take(step.count);
      sum_.take(kGroupRows);
      if (step.last) {
        mark(tile_, kMarkPv, flops_per_dim(step) * v_dim_);
        add_values(step, first);
      }
    }
    pending_.flush();
    sum_.take(kGroupRows);
  }

  float* scores_of(int step) const { return work_.scores + step % 2 * 4 * kTileFloats; }

  /// Of a product of a group of rows with all the keys it sees in a block. Scores
  /// are started two steps ahead, softmax runs beside them: a trace shows both as QK.
  int64_t flops_per_dim(const Step& step) const {
    const int64_t rows = smaller(kGroupRows, rows_ - step.row / kGroupRows * kGroupRows);
    return 2 * rows * (step.end_chunk - step.first_chunk) * kTileDepth;
  }

  int products_of(const Step& step) const {
    return depth_ / kTileDepth * (step.count > kTileRows ? 4 : 2);
  }

  /// What each of `slices` takes of `work`.
  static int share_of(int work, int slices) { return (work + slices - 1) / slices; }

  template <class Slice>
  void start_scores(int index, Slice slice) {
    const Step& step = work_.steps[index];
    const Bfloat16* queries = work_.queries + int64_t{step.row} * depth_;
    const Bfloat16* keys = work_.keys + int64_t{step.chunk} * kTileDepth * depth_;
    if (step.count > kTileRows) {
      multiply_queries<2>(queries, keys, depth_, pending_, scores_of(index), slice);
    } else {
      multiply_queries<1>(queries, keys, depth_, pending_, scores_of(index), slice);
    }
  }

  SoftmaxGroup softmax_of(const Step& step) const {
    const int64_t group = step.row / kGroupRows * kGroupRows;
    return {
        .factor = factor_,
        .column_tiles = v_dim_ / 16,
        .first_chunk = step.first_chunk,
        .references = work_.references + group,
        .sums = work_.sums + group * kLanes,
        .output = work_.output + group * v_dim_,
        .probabilities = work_.probabilities,
    };
  }

  /// Applies softcap and sets the scores of keys that a row does not see to -inf.
  void restrict_scores(const Step& step, int64_t first, float* scores) const {
    const int64_t key = first + int64_t{step.chunk} * kTileDepth;
    if (tile_.mask == nullptr && tile_.softcap == 0 &&
        visible_keys(tile_, (step.row + step.count - 1) / tile_.group).begin <= key &&
        visible_keys(tile_, step.row / tile_.group).end >= key + kTileDepth) {
      return;
    }
    for (int i = 0; i < step.count; ++i) {
      const uint32_t bits = visible_bits((step.row + i) / tile_.group, key);
      for (int half = 0; half < 2; ++half) {
        float* x = scores + score_offset(i) + half * kTileFloats;
        if (tile_.softcap > 0) apply_softcap(x, 0, kLanes, tile_.scale, tile_.softcap);
        store(x, select(bits >> half * kLanes, load(x), splat(-__builtin_inff())));
      }
      if (i % 8 == 7) keep_tiles_awake();
    }
  }

  /// Bit i: the token sees key + i. `key` is a multiple of 32.
  uint32_t visible_bits(int64_t token, int64_t key) const {
    const KeyRange seen = visible_keys(tile_, token);
    const auto bits_below = [&](int64_t limit) {
      return (uint64_t{1} << larger(0, smaller(kTileDepth, limit - key))) - 1;
    };
    auto bits = static_cast<uint32_t>(bits_below(seen.end) & ~bits_below(seen.begin));
    if (tile_.mask != nullptr && bits != 0) {
      uint32_t word;
      __builtin_memcpy(&word, tile_.mask + token * tile_.mask_stride + key / 8, sizeof word);
      bits &= word;
    }
    return bits;
  }

  /// O += P V for the group of rows that ends with this step.
  void add_values(const Step& step, int64_t first) {
    const int count = step.row % kGroupRows + step.count;
    switch ((count + kTileRows - 1) / kTileRows) {
      case 1:
        add_values<1>(step, count);
        break;
      case 2:
        add_values<2>(step, count);
        break;
      case 3:
        add_values<3>(step, count);
        break;
      default:
        add_values<4>(step, count);
    }
    if (num_special_ == 0) return;
    pending_.flush();
    sum_.take(kGroupRows);
    for (int i = 0; i < num_special_; ++i) {
      add_special_value(step, count, first, special_keys_[i], special_values_[i]);
    }
  }

  /// The sums start at zero and reach O one column tile later, by vector adds
  /// between the products: reading O into the tiles would wait for their stores.
  template <int kRowTiles>
  void add_values(const Step& step, int count) {
    const int chunks = step.chunk + 1 - step.first_chunk;
    const int share = share_of(count, kRowTiles * static_cast<int>(larger(1, chunks - 1)));
    const SoftmaxGroup softmax = softmax_of(step);
    const Bfloat16* p = softmax.probabilities_of(0, step.first_chunk);
    const Bfloat16* values = work_.values + int64_t{step.first_chunk} * kTileElements;
    float* output = softmax.output;
    for (int d = 0; d < v_dim_; d += 16) {
      multiply_values<kRowTiles>(p, values, chunks, pending_, work_.product, [&] {
        sum_.take(share);
      });
      sum_.take(kGroupRows);
      sum_ = {work_.product, output, count};
      values += int64_t{kAmxChunks} * kTileElements;
      output += kGroupRows * kLanes;
    }
  }

  /// O += P V for a key that pack_block left out, in the rows that see it.
  [[gnu::noinline]] void add_special_value(
      const Step& step, int count, int64_t first, int key, const Bfloat16* value
  ) const {
    const SoftmaxGroup softmax = softmax_of(step);
    const int group = step.row / kGroupRows * kGroupRows;
    for (int i = 0; i < count; ++i) {
      if (!sees(tile_, (group + i) / tile_.group, first + key)) continue;
      const Bfloat16* probabilities = softmax.probabilities_of(i, key / kTileDepth);
      const Vector p = splat(Bfloat16Engine::probability(probabilities + key % kTileDepth));
      float* output = softmax.output + i * kLanes;
      for (int d = 0; d < v_dim_; d += 16, output += kGroupRows * kLanes) {
        store(output, fma(p, load(value + d), load(output)));
      }
    }
  }

  /// Normalises a row and writes it.
  void finish(int row) const {
    const int64_t token = row / tile_.group;
    const int64_t head = row % tile_.group;
    const RowState state = {
        work_.references[row] * factor_ + kHeadroom, reduce_add(load(work_.sums + row * kLanes))
    };
    const float* output =
        work_.output + int64_t{row / kGroupRows} * kGroupRows * v_dim_ + row % kGroupRows * kLanes;
    Bfloat16* out = static_cast<Bfloat16*>(tile_.out) + token * tile_.out_token_stride +
                    head * tile_.out_head_stride;
    const float* sink = tile_.sinks == nullptr ? nullptr : tile_.sinks + head;
    const Vector scale = splat(output_scale(state, sink));
    for (int d = 0; d < v_dim_; d += 16, output += kGroupRows * kLanes) {
      store(out + d, mul(load(output), scale));
    }
    if (tile_.lse != nullptr) {
      tile_.lse[token * tile_.lse_token_stride + head * tile_.lse_head_stride] = row_lse(state);
    }
  }

  const AttentionTile& tile_;
  const int rows_;
  const int depth_;  // of the products Q K^T: qk_dim, filled up to whole tiles
  const int v_dim_;
  const float factor_;
  const AmxWorkspace work_;
  PendingSums pending_;
  PendingRows sum_ = {};
  BlockRows block_;
  // Keys of the current block whose values are not all finite.
  int num_special_ = 0;
  int special_keys_[kAmxBlockKeys];
  const Bfloat16* special_values_[kAmxBlockKeys];
};

}  // namespace
}  // namespace cpattn::kernels
