// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop of decode: it reads K and V in place, once, and is memory-bound. Needs the
// vector layer and the engines included first.
//
// The KV heads of a token lie next to each other in memory (NHD), and a single head is too short a
// run to stream: a tile takes several heads, one after the other for each block of keys, while the
// next keys or values of all heads are prefetched in the order of memory.
#include "kernels/attention/in_place_workspace-inl.h"
#include "kernels/engines/unpacked-inl.h"
#include "kernels/rows/row_factors-inl.h"
#include "kernels/softmax/results-inl.h"
#include "kernels/softmax/score_bias-inl.h"

namespace cpattn::kernels {
namespace {

/// Prefetch distance of keys and values in bytes. They go to the L2, which has more misses in
/// flight than the L1: one core of Zen 4 reads half as much again from memory that way.
constexpr int64_t kBytesAhead = 8 * 1024;
constexpr int kFetchLocality = 2;
/// The fewest keys that are fetched ahead: as many as are multiplied at once.
constexpr int kMinKeysAhead = 8;

/// Q is of type T, K and V are of type Stored. Weights have kParts parts: 1, which rounds them to
/// operands, or kWeightParts.
template <class T, class Engine, int kExp2Degree, int kParts, class Stored = T>
class InPlaceLoop {
  static_assert(MatrixEngine<Engine, T> && InPlaceEngine<Engine, Stored>);
  using Operand = typename Engine::Operand;
  using Pack = typename Engine::Pack;
  using Loads = InPlace<Stored, Engine>;
  static constexpr bool kCodes = sizeof(Stored) == 1;
  static constexpr int kStoredBytes = sizeof(Stored);
  static constexpr int kQuad = 4 * Engine::kDepthStep;

 public:
  static int64_t scratch_bytes(const AttentionTile* tile) {
    const int64_t rows = round_up(tile->num_tokens * tile->group, kQueryTile);
    return InPlaceWorkspace<Engine, kParts>(
               nullptr, rows * tile->num_kv_heads, tile->nope_dim + tile->rope_dim,
               tile->v_head_dim, padded_bytes(*tile)
    )
        .bytes;
  }

  static bool run(const AttentionTile* tile, void* scratch) {
    return InPlaceLoop(*tile, static_cast<char*>(scratch)).run();
  }

 private:
  static int padded_bytes(const AttentionTile& tile) { return is_padded(tile) ? kStoredBytes : 0; }

  InPlaceLoop(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        head_rows_(tile.num_tokens * tile.group),
        padded_rows_(round_up(head_rows_, kQueryTile)),
        qk_dim_(tile.nope_dim + tile.rope_dim),
        v_dim_(tile.v_head_dim),
        work_(
            scratch, int64_t{padded_rows_} * tile.num_kv_heads, qk_dim_, v_dim_, padded_bytes(tile)
        ),
        k_(tile, tile.stored.nope_dim, tile.nope_dim, kStoredBytes, work_.padded_keys),
        k_rope_(
            tile,
            tile.stored.rope_dim,
            tile.rope_dim,
            kStoredBytes,
            work_.padded_keys + int64_t{kKeyTile} * tile.nope_dim * kStoredBytes
        ),
        v_(tile, tile.stored.v_head_dim, v_dim_, kStoredBytes, work_.padded_values) {}

  bool run() {
    // Heads that do not lie together are read one after the other.
    const bool together = tile_.k.head_stride < tile_.k.row_stride;
    const int step = together ? tile_.num_kv_heads : 1;
    ahead_ = keys_ahead(step);
    for (first_head_ = 0; first_head_ < tile_.num_kv_heads; first_head_ = end_head_) {
      end_head_ = first_head_ + step;
      if (!run_heads()) return false;
    }
    return true;
  }

  int keys_ahead(int heads) const {
    const int64_t bytes = int64_t{heads} * tile_.nope_dim * kStoredBytes;
    const int64_t keys = kBytesAhead / bytes / kMinKeysAhead * kMinKeysAhead;
    return static_cast<int>(larger(kMinKeysAhead, smaller(kInPlaceKeys, keys)));
  }

  /// Heads [first_head_, end_head_).
  bool run_heads() {
    mark(tile_.hooks, kMarkPack);
    prepare_rows();
    const auto [begin, end] = keys_of_tile(tile_);
    int64_t first = begin / kInPlaceKeys * kInPlaceKeys;
    for (; begin < end && first < end; first += kInPlaceKeys) {
      if (should_stop(tile_.hooks)) return false;
      attend(first, begin, end);
    }
    mark(tile_.hooks, kMarkWrite);
    for_rows([&](int row, int slot) {
      finish_row<T>(tile_, row, work_.states[slot], work_.output + int64_t{slot} * v_dim_);
    });
    return true;
  }

  /// Calls function(row of the tile, where its buffers are) for the rows of the heads.
  template <class Function>
  void for_rows(Function function) const {
    for (int head = first_head_; head < end_head_; ++head) {
      for (int i = 0; i < head_rows_; ++i) {
        function(head * head_rows_ + i, (head - first_head_) * padded_rows_ + i);
      }
    }
  }

  void prepare_rows() const {
    const int64_t slots = int64_t{padded_rows_} * (end_head_ - first_head_);
    __builtin_memset(work_.queries, 0, sizeof(Operand) * slots * qk_dim_);
    __builtin_memset(work_.output, 0, sizeof(float) * slots * v_dim_);
    __builtin_memset(work_.zeros, 0, sizeof(float) * v_dim_);
    for_rows([&](int row, int slot) {
      const auto [token, head, kv_head] = row_place(tile_, row);
      const auto* q = row_at<const T>(tile_.q, token, head);
      pack_padded_query<Engine>(tile_, q, tile_.stored.nope_dim, tile_.nope_dim, work_.row);
      if (tile_.rope_dim > 0) {
        pack_padded_query<Engine>(
            tile_, row_at<const T>(tile_.q_rope, token, head), tile_.stored.rope_dim,
            tile_.rope_dim, work_.row + tile_.nope_dim
        );
      }
      Operand* tile = work_.queries + int64_t{slot / kQueryTile} * kQueryTile * qk_dim_;
      for (int d = 0; d < qk_dim_; d += kQuad) {
        __builtin_memcpy(
            tile + d * kQueryTile + slot % kQueryTile * kQuad, work_.row + d,
            sizeof(Operand) * kQuad
        );
      }
      work_.states[slot] = {};
    });
  }

  /// Attends from all rows to those of keys [begin, end) that are in the block from `first` on.
  void attend(int64_t first, int64_t begin, int64_t end) {
    const int n = static_cast<int>(smaller(kInPlaceKeys, end - first));
    if (!any_shown(tile_.seen, 0, tile_.num_tokens, first, n)) return;
    const int padded = round_up(n, kKeyGranule);
    locate_block(first, n, static_cast<int>(larger(0, begin - first)), end);
    const int64_t flops_per_dim = int64_t{2} * head_rows_ * (end_head_ - first_head_) * padded;
    mark(tile_.hooks, kMarkQk, flops_per_dim * qk_dim_);
    for (int key = 0; key < padded; key += kKeyTile) {
      for (int head = first_head_; head < end_head_; ++head) score_keys(head, key);
    }
    mark(tile_.hooks, kMarkSoftmax);
    const int hidden = static_cast<int>(larger(0, begin - first));
    for (int head = first_head_; head < end_head_; ++head) take_softmax(head, first, n, hidden);
    mark(tile_.hooks, kMarkPv, flops_per_dim * v_dim_);
    const bool all_visible = tile_.seen.mask == nullptr && !bias_may_hide(tile_) &&
                             visible_keys(tile_.seen, tile_.num_tokens - 1).begin <= first &&
                             visible_keys(tile_.seen, 0).end >= first + n;
    // O is loaded and stored once a step; small steps keep to the order of memory.
    const int small_step = kCodes ? 2 * kKeyTile : kKeyTile;
    const int step = head_rows_ > kQueryTile ? kInPlaceKeys : small_step;
    for (int key = 0; key < n; key += step) {
      const int count = static_cast<int>(smaller(step, n - key));
      for (int head = first_head_; head < end_head_; ++head) {
        add_values(head, first, key, count, all_visible);
      }
    }
  }

  /// Turns the scores of a head's rows with the n keys from `first` on into probabilities.
  void take_softmax(int head, int64_t first, int n, int hidden) const {
    float k_factors[kInPlaceKeys];
    float v_factors[kInPlaceKeys];
    if constexpr (kCodes) {
      read_row_factors(tile_.codes.k_factors, head, first, n, hidden, k_factors);
      read_row_factors(tile_.codes.v_factors, head, first, n, hidden, v_factors);
    }
    const float scale = scale_of_head(tile_, head);
    const float factor = scale_in_softmax(tile_, head) * kLog2E;
    const int padded = round_up(n, kKeyGranule);
    for (int i = 0; i < head_rows_; ++i) {
      const int64_t slot = int64_t{head - first_head_} * padded_rows_ + i;
      float* scores = work_.scores + slot * kInPlaceKeys;
      Operand* p = weights_of(slot);
      if (kCodes && has_factors(tile_.codes.k_factors)) {
        multiply_row(scores, k_factors, 0, padded);
      }
      finish_scores(tile_, scores, head, i, scale, first, 0, padded, /*all_visible=*/false);
      softmax_row<kExp2Degree>(
          scores, weights_at<kParts>(p, kInPlaceKeys, kRoomAbove), 0, padded, factor,
          work_.states[slot], work_.output + slot * v_dim_, v_dim_
      );
      if constexpr (kCodes) {
        if (has_factors(tile_.codes.v_factors))
          multiply_weights<kParts>(p, kInPlaceKeys, v_factors, padded);
      }
    }
  }

  /// The weights of a row, part after part.
  Operand* weights_of(int64_t slot) const {
    return work_.probabilities + slot * kParts * kInPlaceKeys;
  }

  void read_row_factors(
      const RowFactors& source, int head, int64_t first, int n, int hidden, float* factors
  ) const {
    if (has_factors(source)) read_factors(tile_, source, head, first, n, hidden, factors);
  }

  /// Addresses of the n keys from `first` on, and of the keys after them to prefetch. No token sees
  /// the first `hidden` keys.
  void locate_block(int64_t first, int n, int hidden, int64_t end) {
    const int known = static_cast<int>(smaller(kInPlaceKeys + ahead_, end - first));
    const auto locate = [&](const PagedRows& source, const char** rows) {
      locate_visible_rows(source, tile_, first, known, hidden, kStoredBytes, rows);
      stand_in(rows, known, round_up(n, kKeyGranule) + ahead_, hidden);
    };
    locate(tile_.k, keys_);
    if (tile_.rope_dim > 0) locate(tile_.k_rope, rope_keys_);
    locate(tile_.v, values_);
  }

  static const char* row_of_head(const PagedRows& source, int head, const char* row) {
    return row + head * source.head_stride * kStoredBytes;
  }

  /// Scores of the rows of a head with kKeyTile keys from `key` of the block on.
  void score_keys(int head, int key) const {
    const Operand* keys[kKeyTile];
    const Operand* rope[kKeyTile];
    for (int i = 0; i < kKeyTile; ++i) {
      fetch_row<kFetchLocality>(
          row_of_head(tile_.k, head, keys_[key + i + ahead_]), tile_.nope_dim * kStoredBytes
      );
      Operand* wide = work_.keys + int64_t{i} * qk_dim_;
      const char* row = k_.read(row_of_head(tile_.k, head, keys_[key + i]), i);
      keys[i] = operands(row, tile_.nope_dim, wide);
      if (tile_.rope_dim > 0) {
        const char* rope_row =
            k_rope_.read(row_of_head(tile_.k_rope, head, rope_keys_[key + i]), i);
        rope[i] = operands(rope_row, tile_.rope_dim, wide + tile_.nope_dim);
      }
    }
    for (int i = 0; i < padded_rows_; i += kQueryTile) {
      const int64_t slot = int64_t{head - first_head_} * padded_rows_ + i;
      score_tile(
          work_.queries + slot * qk_dim_, keys, rope, work_.scores + slot * kInPlaceKeys + key
      );
    }
  }

  /// A row of keys as operands: itself, or widened to `wide`.
  static const Operand* operands(const char* row, int dim, Operand* wide) {
    if constexpr (!Loads::kWidens) return reinterpret_cast<const Operand*>(row);
    Loads::widen(reinterpret_cast<const Stored*>(row), dim, wide);
    return wide;
  }

  /// Scores of a tile of queries with a tile of keys. Not inlined, so that the addresses of all
  /// keys have registers.
  [[gnu::noinline]] void score_tile(
      const Operand* queries, const Operand* const* keys, const Operand* const* rope, float* scores
  ) const {
    Vector sums[kTileVectors][kKeyTile];
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kKeyTile; ++j) sums[i][j] = splat(0.0F);
    }
    add_products(queries, keys, tile_.nope_dim, sums);
    if (tile_.rope_dim > 0) {
      add_products(queries + tile_.nope_dim * kQueryTile, rope, tile_.rope_dim, sums);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kTileVectors; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kKeyTile; j += 4) {
        float quads[kLanes];
        store(quads, sums_of_quads(sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]));
        for (int row = 0; row < kLanes / 4; ++row) {
          float* to = scores + (i * kLanes / 4 + row) * kInPlaceKeys + j;
          __builtin_memcpy(to, quads + row * 4, sizeof(float) * 4);
        }
      }
    }
  }

  [[gnu::always_inline]] static void add_products(
      const Operand* queries,
      const Operand* const* keys,
      int dim,
      Vector (&sums)[kTileVectors][kKeyTile]
  ) {
    for (int d = 0; d < dim; d += kQuad) {
      Pack q[kTileVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kTileVectors; ++i) {
        q[i] = Engine::load_columns(queries + d * kQueryTile + i * kLanes * Engine::kDepthStep);
      }
#pragma GCC unroll 8
      for (int j = 0; j < kKeyTile; ++j) {
        const Pack k = Loads::load_quad(keys[j] + d);
#pragma GCC unroll 4
        for (int i = 0; i < kTileVectors; ++i) {
          sums[i][j] = Engine::multiply_add(q[i], k, sums[i][j]);
        }
      }
    }
  }

  /// O += P V for a head's rows and `count` keys from `key` of the block that starts at `first`.
  /// Rows that see different keys take only their own: 0 times another's infinity is NaN.
  void add_values(int head, int64_t first, int key, int count, bool all_visible) const {
    const char* values[kInPlaceKeys + 1];
    for (int i = 0; i < count && tile_.v.data != tile_.k.data; ++i) {
      fetch_row<kFetchLocality>(
          row_of_head(tile_.v, head, values_[key + i + ahead_]), v_dim_ * kStoredBytes
      );
    }
    values[count] = reinterpret_cast<const char*>(work_.zeros);
    const int64_t slot = int64_t{head - first_head_} * padded_rows_;
    if (all_visible || (bias_may_hide(tile_) && all_have_weight(slot, key, count))) {
      for (int i = 0; i < count; ++i) values[i] = value_row(head, key + i, i);
      add_values(slot, head_rows_, values, key, count);
      return;
    }
    const int rows = bias_may_hide(tile_) ? 1 : tile_.group;
    for (int row = 0; row < head_rows_; row += rows) {
      const int64_t query_head = head * tile_.group + row % tile_.group;
      for (int i = 0; i < count; ++i) {
        values[i] = sees(tile_, row / tile_.group, query_head, first + key + i)
                        ? value_row(head, key + i, i)
                        : values[count];
      }
      add_values(slot + row, rows, values, key, count);
    }
  }

  /// Whether each row of the head at `slot` gives weight to each of `count` keys, and so sees it.
  [[gnu::noinline]] bool all_have_weight(int64_t slot, int key, int count) const {
    bool all = true;
    for (int row = 0; row < head_rows_; ++row) {
      const Operand* p = weights_of(slot + row) + key;
      for (int i = 0; i < count; ++i) all &= Engine::probability(p + i) != 0;
    }
    return all;
  }

  /// The value of key `key` of the block, the i-th of the values that are added together.
  const char* value_row(int head, int key, int i) const {
    return v_.read(row_of_head(tile_.v, head, values_[key]), i);
  }

  /// O += P V for `rows` rows from `slot` on and keys [key, key + count) of the block.
  /// values[count] is readable, and zeros.
  void add_values(int64_t slot, int rows, const char* const* values, int key, int count) const {
    for (int d = 0; d < v_dim_; d += kPanel) {
      const int vectors = static_cast<int>(smaller(kPanelVectors, (v_dim_ - d) / kLanes));
      for_row_tiles(rows, [&]<int kRows>(int i) {
        const Operand* p = weights_of(slot + i) + key;
        float* o = work_.output + (slot + i) * v_dim_ + d;
        add_vectors<Stored, Engine, kParts, kRows>(
            vectors, p, kInPlaceKeys, values, count, d, o, v_dim_
        );
      });
    }
  }

  const AttentionTile& tile_;
  const int head_rows_;    // of one KV head
  const int padded_rows_;  // padded to whole tiles of queries
  const int qk_dim_;
  const int v_dim_;
  const InPlaceWorkspace<Engine, kParts> work_;
  const PaddedRows k_, k_rope_, v_;
  int first_head_, end_head_;  // at work
  int ahead_;                  // prefetch distance in keys
  // The addresses of the block's keys and values, for the first KV head.
  const char* keys_[2 * kInPlaceKeys];
  const char* rope_keys_[2 * kInPlaceKeys];
  const char* values_[2 * kInPlaceKeys];
};

}  // namespace
}  // namespace cpattn::kernels
