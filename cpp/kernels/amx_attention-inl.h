// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention loop on AMX tiles, for bfloat16: for each block of keys, pack K
// and V once, then take 64 rows at a time through Q K^T and softmax, 32 rows and
// 32 keys at once, and through P V. Needs attention-inl.h, the tiles and the
// other amx headers included first.
//
// As in attention-inl.h everything happens at fixed positions of the sequence,
// blocks of 256 keys in chunks of 32, so that a row's bits do not depend on
// which rows it is computed with.

namespace cpattn::kernels {
namespace {

/// Buffers of one tile of work, carved out of the caller's scratch; rows are
/// padded to whole groups.
struct AmxWorkspace {
  Bfloat16* queries;        // [rows / 16][depth / 32][16][32]
  Bfloat16* keys;           // [block / 16][depth / 32][16][16][2]
  Bfloat16* values;         // [v_head_dim / 16][chunks][16][16][2]
  Bfloat16* probabilities;  // [chunks][64][32]
  Bfloat16* zeros;          // [v_head_dim]
  float* scores;            // [2 row tiles][2 key tiles][16][16]
  float* product;           // [64][16]
  float* output;            // [groups][v_head_dim / 16][64][16]
  float* sums;              // [rows][16]
  float* references;        // [rows]
  int64_t bytes;

  AmxWorkspace(char* base, int64_t rows, int depth, int v_head_dim) {
    const int64_t padded = round_up(static_cast<int>(rows), kGroupRows);
    int64_t used = 0;
    const auto take = [&]<class T>(T*& buffer, int64_t elements) {
      buffer = reinterpret_cast<T*>(base + used);
      used += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    };
    take(queries, padded * depth);
    take(keys, int64_t{kAmxBlockKeys} * depth);
    take(values, int64_t{kAmxBlockKeys} * v_head_dim);
    take(probabilities, int64_t{kAmxBlockKeys} * kGroupRows);
    take(zeros, v_head_dim);
    take(scores, 4 * kTileFloats);
    take(product, 4 * kTileFloats);
    take(output, padded * v_head_dim);
    take(sums, padded * kLanes);
    take(references, padded);
    bytes = used;
  }
};

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
        work_(scratch, rows_, depth_, v_dim_) {}

  bool run() {
    prepare();
    const int64_t begin = visible_keys(tile_, 0).begin;
    const int64_t end = visible_keys(tile_, tile_.num_tokens - 1).end;
    for (int64_t first = begin / kAmxBlockKeys * kAmxBlockKeys; begin < end && first < end;
         first += kAmxBlockKeys) {
      if (tile_.should_stop(tile_.stop_context)) return false;
      const int n = static_cast<int>(smaller(kAmxBlockKeys, end - first));
      pack_block(first, n, static_cast<int>(larger(0, begin - first)));
      for (int row = 0; row < rows_; row += kGroupRows) {
        attend(row, static_cast<int>(smaller(kGroupRows, rows_ - row)), first, n);
      }
    }
    for (int row = 0; row < rows_; ++row) finish(row);
    return true;
  }

  void prepare() {
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

  /// Keys [first, first + n). The first `hidden` of them no token sees: they may
  /// hold anything, NaN too, so a visible one stands in for them.
  void pack_block(int64_t first, int n, int hidden) {
    const char* rows[kAmxBlockKeys];
    const auto locate = [&](const PagedRows& source) {
      locate_rows(source, tile_, first + hidden, n - hidden, sizeof(Bfloat16), rows + hidden);
      for (int i = 0; i < hidden; ++i) rows[i] = rows[hidden];
    };
    locate(tile_.k);
    pack_tile_keys(rows, n, tile_.head_dim, 0, depth_, work_.keys);
    if (tile_.rope_dim > 0) {
      locate(tile_.k_rope);
      pack_tile_keys(rows, n, tile_.rope_dim, tile_.head_dim, depth_, work_.keys);
    }
    locate(tile_.v);
    num_special_ = pack_tile_values(rows, n, v_dim_, work_.values, special_keys_);
    if (num_special_ == 0) return;
    // Zero times an infinity is NaN, so such values must not meet the rows that
    // do not see them: zeros stand in for them, and add_special_value adds them.
    for (int i = 0; i < num_special_; ++i) {
      const char*& row = rows[special_keys_[i]];
      special_values_[i] = reinterpret_cast<const Bfloat16*>(row);
      row = reinterpret_cast<const char*>(work_.zeros);
    }
    int still_special[kAmxBlockKeys];
    pack_tile_values(rows, n, v_dim_, work_.values, still_special);
  }

  /// Rows [row, row + count) against keys [first, first + n).
  void attend(int row, int count, int64_t first, int n) {
    const KeyRange seen = {
        visible_keys(tile_, row / tile_.group).begin - first,
        visible_keys(tile_, (row + count - 1) / tile_.group).end - first
    };
    const int first_chunk = static_cast<int>(larger(0, seen.begin)) / kTileDepth;
    const int chunks =
        round_up(static_cast<int>(larger(0, smaller(n, seen.end))), kTileDepth) / kTileDepth -
        first_chunk;
    if (chunks <= 0) return;
    const SoftmaxGroup softmax = {
        .factor = factor_,
        .column_tiles = v_dim_ / 16,
        .first_chunk = first_chunk,
        .references = work_.references + row,
        .sums = work_.sums + int64_t{row} * kLanes,
        .output = work_.output + int64_t{row} * v_dim_,
        .probabilities = work_.probabilities,
    };
    for (int chunk = first_chunk; chunk < first_chunk + chunks; ++chunk) {
      for (int i = 0; i < count; i += kScoreRows) {
        attend_chunk(
            softmax, row, i, static_cast<int>(smaller(kScoreRows, count - i)), first, chunk
        );
      }
    }
    add_values(count, first_chunk, chunks, softmax.output);
    for (int i = 0; i < num_special_; ++i) {
      add_special_value(softmax, row, count, first, special_keys_[i], special_values_[i]);
    }
  }

  /// Rows `offset` to `offset + count` of the group at `row` against 32 keys.
  void attend_chunk(
      const SoftmaxGroup& softmax, int row, int offset, int count, int64_t first, int chunk
  ) {
    const Bfloat16* queries = work_.queries + int64_t{row + offset} * depth_;
    const Bfloat16* keys = work_.keys + int64_t{chunk} * kTileDepth * depth_;
    if (count > kTileRows) {
      multiply_queries<2>(queries, keys, depth_, work_.scores);
    } else {
      multiply_queries<1>(queries, keys, depth_, work_.scores);
    }
    const int64_t key = first + chunk * kTileDepth;
    const bool whole = sees_all(row + offset, count, key);
    for (int i = 0; i < count; ++i) {
      float* scores = work_.scores + i / kTileRows * 2 * kTileFloats + i % kTileRows * 16;
      if (!whole) restrict_scores(scores, row + offset + i, key);
      softmax.add_scores(offset + i, chunk, load(scores), load(scores + kTileFloats));
    }
  }

  /// Whether the scores of these rows and of 32 keys go to softmax as they are.
  bool sees_all(int row, int count, int64_t key) const {
    if (tile_.mask != nullptr || tile_.softcap > 0) return false;
    return visible_keys(tile_, (row + count - 1) / tile_.group).begin <= key &&
           visible_keys(tile_, row / tile_.group).end >= key + kTileDepth;
  }

  /// Bit i: the row sees key + i. `key` is a multiple of 32.
  uint32_t visible_bits(int row, int64_t key) const {
    const int64_t token = row / tile_.group;
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

  /// Applies softcap and sets the scores of keys that the row does not see to -inf.
  void restrict_scores(float* scores, int row, int64_t key) const {
    const uint32_t bits = visible_bits(row, key);
    for (int half = 0; half < 2; ++half) {
      float* x = scores + half * kTileFloats;
      if (tile_.softcap > 0) apply_softcap(x, 0, kLanes, tile_.scale, tile_.softcap);
      store(x, select(bits >> half * kLanes, load(x), splat(-__builtin_inff())));
    }
  }

  /// O += P V.
  void add_values(int count, int first_chunk, int chunks, float* output) {
    const Bfloat16* p = work_.probabilities + int64_t{first_chunk} * kGroupRows * kTileDepth;
    for (int d = 0; d < v_dim_; d += 16, output += kGroupRows * kLanes) {
      const Bfloat16* values =
          work_.values + (int64_t{d / 16} * kAmxChunks + first_chunk) * kTileElements;
      switch ((count + kTileRows - 1) / kTileRows) {
        case 1:
          multiply_values<1>(p, values, chunks, work_.product);
          break;
        case 2:
          multiply_values<2>(p, values, chunks, work_.product);
          break;
        case 3:
          multiply_values<3>(p, values, chunks, work_.product);
          break;
        default:
          multiply_values<4>(p, values, chunks, work_.product);
      }
      for (int i = 0; i < count * kLanes; i += kLanes) {
        store(output + i, add(load(output + i), load(work_.product + i)));
      }
    }
  }

  /// O += P V for a key that pack_block left out, in the rows that see it.
  [[gnu::noinline]] void add_special_value(
      const SoftmaxGroup& softmax, int row, int count, int64_t first, int key, const Bfloat16* value
  ) const {
    for (int i = 0; i < count; ++i) {
      if (!sees(tile_, (row + i) / tile_.group, first + key)) continue;
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
    const RowState state = {work_.references[row], reduce_add(load(work_.sums + row * kLanes))};
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
  // Keys of the current block whose values are not all finite.
  int num_special_ = 0;
  int special_keys_[kAmxBlockKeys];
  const Bfloat16* special_values_[kAmxBlockKeys];
};

}  // namespace
}  // namespace cpattn::kernels
