// SPDX-License-Identifier: Apache-2.0
#pragma once

// Decode on AMX tiles: up to sixteen rows of a KV head, whose results need not have the bits of a
// prompt. Tile loads read bfloat16 keys and values in place.
//
// Sixteen keys are a left-hand tile as they are, and the few scores are transposed. A right-hand
// tile needs the values of two keys interleaved, which would mean packing. Here a row of it is one
// value, whose neighbouring dimensions form pairs: one of the two probabilities that meet a pair is
// zero, so that a product sums the even or the odd dimensions. Half of the work is on zeros, which
// costs nothing while the loop waits for memory; neither does the second part of each probability,
// its rest.
//
// 8-bit codes become rows of such tiles, which is also cheaper than interleaving them.
#include "kernels/attention/amx/head_turns-inl.h"
#include "kernels/attention/amx/in_place_workspace-inl.h"
#include "kernels/attention/amx/scores-inl.h"

namespace cpattn::kernels {
namespace {

/// The memory of sixteen rows of keys or values, which become tiles of 32 dimensions each.
struct TileSource {
  const void* rows;
  int64_t row_bytes;
  int64_t tile_bytes;  // from one tile to the next

  template <int kTile>
  [[gnu::always_inline]] void load(int tile) const {
    load_tile_rows<kTile>(static_cast<const char*>(rows) + tile * tile_bytes, row_bytes);
  }
};

/// Code is the type of keys and values: Bfloat16, or codes of 8 bits.
template <class Code>
class AmxInPlace {
  using T = PreciseBfloat16;
  using Group = SoftmaxGroup<T>;
  static constexpr bool kCodes = sizeof(Code) == 1;

 public:
  static int64_t scratch_bytes(const AttentionTile& tile) {
    return AmxInPlaceWorkspace(nullptr, tile).bytes;
  }

  AmxInPlace(const AttentionTile& tile, char* scratch)
      : tile_(tile),
        rows_(tile.num_tokens * tile.group),
        depth_(tile.nope_dim + tile.rope_dim),
        v_dim_(tile.v_head_dim),
        work_(scratch, tile),
        turns_(tile) {}

  /// Returns false if should_stop() ended it early. Writes nothing unless all sums are finite.
  bool run() {
    mark(tile_.hooks, kMarkPack);
    prepare();
    while (turns_.advance()) {
      take_head(turns_.rows().head());
      if (turns_.rows().head() == 0) {
        // Tiles are empty between two turns.
        if (should_stop(tile_.hooks)) return false;
        tiles_.configure();
      }
      attend(turns_.rows());
      turns_.fetch_rest();
    }
    finite_ = all_finite();
    if (!finite_) return true;
    mark(tile_.hooks, kMarkWrite);
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      take_head(head);
      for (int row = 0; row < rows_; ++row) finish(head, row);
    }
    return true;
  }

  /// Whether run() wrote the results. Infinities and NaN of values turn the zeros of other
  /// dimensions, and of rows that do not see these values, into NaN.
  bool finite() const { return finite_; }

 private:
  void take_head(int head) {
    scale_ = scale_of_head(tile_, head);
    const int64_t row = int64_t{head} * kTileRows;
    states_ = work_.states.from(row);
    group_ = states_.group(tile_, scale_, work_.output + row * v_dim_, work_.probabilities);
    group_.column_stride = kTileFloats;
    queries_ = work_.queries + row * depth_;
  }

  void prepare() {
    __builtin_memset(work_.weights, 0, sizeof(Bfloat16) * AmxInPlaceWorkspace::kWeights);
    Magnitude magnitude;
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      take_head(head);
      __builtin_memset(group_.output, 0, sizeof(float) * kTileRows * v_dim_);
      states_.clear(tile_, kTileRows);
      pack_query_columns<T>(tile_, head, depth_, queries_, magnitude);
    }
  }

  /// Attends from the rows of the head to the keys of a turn.
  void attend(const SourceRows<T>& rows) {
    if (has_factors(tile_.codes.k_factors))
      rows.read_row_factors(tile_.codes.k_factors, k_factors_);
    if (has_factors(tile_.codes.v_factors))
      rows.read_row_factors(tile_.codes.v_factors, v_factors_);
    const int64_t flops = int64_t{2} * rows_ * rows.count();
    mark(tile_.hooks, kMarkQk, flops * depth_);
    multiply_keys(rows);
    turns_.fetch(kTileDepth / 4);
    take_softmax(rows.first());
    mark(tile_.hooks, kMarkPv, flops * v_dim_);
    weigh();
    turns_.fetch(kTileDepth / 4);
    TileSource values[2];
    values[0] = rows_of(rows, rows.v, tile_.v.row_stride, 0, v_dim_, work_.values);
    // Keys after the last have no weight.
    values[1] = rows.count() <= kTileRows ? values[0]
                                          : rows_of(
                                                rows, rows.v, tile_.v.row_stride, kTileRows, v_dim_,
                                                work_.values + int64_t{kTileRows} * v_dim_
                                            );
    int d = 0;
    for (; d + 2 <= v_dim_ / kTileDepth; d += 2) multiply_values<2>(values, d);
    if (d < v_dim_ / kTileDepth) multiply_values<1>(values, d);
  }

  /// Whether sixteen keys from `key` on stand in one page, and all may be read.
  bool in_place(const SourceRows<T>& rows, int key) const {
    return !kCodes && key >= rows.hidden() && key + kTileRows <= rows.count() &&
           tile_.page_size % kTileRows == 0;
  }

  /// The source of sixteen rows of `dim` dimensions, in memory or copied to `staged`.
  TileSource rows_of(
      const SourceRows<T>& source,
      const char* const* rows,
      int64_t row_stride,
      int key,
      int dim,
      Bfloat16* staged
  ) const {
    if (in_place(source, key)) {
      return {rows[key], row_stride * int64_t{sizeof(T)}, kTileDepth * int64_t{sizeof(T)}};
    }
    stage(rows + key, static_cast<int>(smaller(kTileRows, source.count() - key)), dim, staged);
    return {staged, kTileDepth * int64_t{sizeof(T)}, kTileElements * int64_t{sizeof(T)}};
  }

  /// Copies n rows of `dim` dimensions to tiles [dim / 32][16][32]; then zeros.
  void stage(const char* const* rows, int n, int dim, Bfloat16* tiles) const {
    const char* all[kTileRows];
    for (int i = 0; i < kTileRows; ++i) all[i] = i < n ? rows[i] : kZeroRow;
    if constexpr (kCodes) {
      pack_code_rows<Code, kTileRows>(all, dim, 0, dim, tiles, [&] { turns_.fetch(1); });
    } else {
      Magnitude magnitude;
      pack_tile_rows<T, kTileRows>(all, dim, 0, dim, tiles, magnitude, [] {});
    }
  }

  /// Computes the scores of a turn, keys being rows.
  void multiply_keys(const SourceRows<T>& rows) {
    clear_tile<0>();
    clear_tile<1>();
    const Bfloat16* queries = queries_;
    Bfloat16* staged = work_.keys;
    const auto multiply = [&](const char* const* places, const PagedRows& source, int dim) {
      TileSource keys[2];
      keys[0] = rows_of(rows, places, source.row_stride, 0, dim, staged);
      staged += int64_t{kTileRows} * dim;
      // The scores of keys after the last are never read.
      keys[1] = rows.count() <= kTileRows
                    ? keys[0]
                    : rows_of(rows, places, source.row_stride, kTileRows, dim, staged);
      staged += int64_t{kTileRows} * dim;
      for (int d = 0; d < dim / kTileDepth; ++d, queries += kTileElements) {
        load_tile<4>(queries);
        keys[0].template load<6>(d);
        multiply_tiles<0, 6, 4>();
        keys[1].template load<7>(d);
        multiply_tiles<1, 7, 4>();
      }
    };
    multiply(rows.k, tile_.k, tile_.nope_dim);
    if (tile_.rope_dim > 0) multiply(rows.k_rope, tile_.k_rope, tile_.rope_dim);
    store_tile<0>(work_.scores);
    store_tile<1>(work_.scores + kNextKeys);
  }

  /// Turns the scores of a turn into probabilities.
  void take_softmax(int64_t first) {
    const Step step{
        .row = 0, .count = rows_, .chunk = 0, .first_chunk = 0, .end_chunk = 1, .last = false
    };
    transpose_scores(rows_, work_.scores);
    const float* factors = has_factors(tile_.codes.k_factors) ? k_factors_ : nullptr;
    prepare_scores<T>(tile_, step, first, scale_, factors, true, states_.maxima, work_.scores);
    StepRows<T>(group_, step, work_.scores).take_rest();
  }

  /// Makes the left-hand tiles of the probabilities.
  void weigh() const {
    for (int row = 0; row < rows_; ++row) {
      const Bfloat16* cells = group_.probabilities_of(row, 0);
      __m512i parts[Group::kParts];
      if (has_factors(tile_.codes.v_factors)) {
        const Vector first = mul(Group::load_parts(cells), load(v_factors_));
        const Vector second = mul(Group::load_parts(cells + kLanes), load(v_factors_ + kLanes));
        TileFormat<T>::split(first, second, parts);
      } else {
        for (int part = 0; part < Group::kParts; ++part) {
          parts[part] = _mm512_load_si512(cells + part * Group::kPartElements);
        }
      }
      for (int part = 0; part < Group::kParts; ++part) {
        place(0, part, row, _mm512_castsi512_si256(parts[part]));
        place(1, part, row, _mm512_extracti64x4_epi64(parts[part], 1));
      }
    }
  }

  /// The tiles of one part of the weights of sixteen keys: for even dimensions, and for odd ones.
  Bfloat16* weights_of(int keys, int part) const {
    return work_.weights + (int64_t{keys} * Group::kParts + part) * 2 * kTileElements;
  }

  void place(int keys, int part, int row, __m256i words) const {
    Bfloat16* cell = weights_of(keys, part) + row * kTileDepth;
    const __m512i even = _mm512_cvtepu16_epi32(words);
    _mm512_store_si512(cell, even);
    _mm512_store_si512(cell + kTileElements, _mm512_slli_epi32(even, 16));
  }

  /// O += P V for kTiles times 32 dimensions, from tile `d` on.
  template <int kTiles>
  void multiply_values(const TileSource* values, int d) {
    float* output = group_.output + int64_t{2} * d * kTileFloats;
    load_tile<0>(output);
    load_tile<1>(output + kTileFloats);
    if constexpr (kTiles == 2) {
      load_tile<2>(output + 2 * kTileFloats);
      load_tile<3>(output + 3 * kTileFloats);
    }
    for (int i = 0; i < 2; ++i) {
      values[i].template load<6>(d);
      if constexpr (kTiles == 2) values[i].template load<7>(d + 1);
      for (int part = 0; part < Group::kParts; ++part) {
        load_tile<4>(weights_of(i, part));
        load_tile<5>(weights_of(i, part) + kTileElements);
        multiply_tiles<0, 4, 6>();
        multiply_tiles<1, 5, 6>();
        if constexpr (kTiles == 2) {
          multiply_tiles<2, 4, 7>();
          multiply_tiles<3, 5, 7>();
        }
      }
      turns_.fetch(4);
    }
    store_tile<0>(output);
    store_tile<1>(output + kTileFloats);
    if constexpr (kTiles == 2) {
      store_tile<2>(output + 2 * kTileFloats);
      store_tile<3>(output + 3 * kTileFloats);
    }
  }

  bool all_finite() const {
    bool finite = true;
    for (int head = 0; head < tile_.num_kv_heads; ++head) {
      for (int row = 0; row < rows_; ++row) {
        const int64_t place = int64_t{head} * kTileRows + row;
        const float* output = work_.output + int64_t{head} * kTileRows * v_dim_ + row * kLanes;
        // Zero times an infinity or NaN is NaN.
        Vector zeros = mul(load(work_.states.exact_sums + place * kLanes), splat(0.0F));
        for (int d = 0; d < v_dim_ / 16; ++d) {
          zeros = fma(load(output + d * kTileFloats), splat(0.0F), zeros);
        }
        finite = finite && reduce_add(zeros) == 0;
      }
    }
    return finite;
  }

  void finish(int head, int row) const {
    const RowState state = states_.finished(tile_, row, group_.factor);
    const float* output = group_.output + row * kLanes;
    float columns[kMaxHeadDim];
    for (int d = 0; d < v_dim_; d += kTileDepth, output += 2 * kTileFloats) {
      interleave(load(output), load(output + kTileFloats), columns + d);
    }
    finish_row<T>(tile_, int64_t{head} * rows_ + row, state, columns);
  }

  /// Puts even and odd dimensions in their order.
  static void interleave(Vector even, Vector odd, float* out) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    store(out, _mm512_permutex2var_ps(even, first, odd));
    store(out + kLanes, _mm512_permutex2var_ps(even, second, odd));
  }

  const TileScope tiles_;
  const AttentionTile& tile_;
  const int rows_;  // of a head
  const int depth_;
  const int v_dim_;
  const AmxInPlaceWorkspace work_;
  HeadTurns<T, kTileDepth> turns_;
  bool finite_ = false;
  float scale_ = 0;  // of the head at work, as the members below
  Group group_{};
  RowStates<T> states_{};
  Bfloat16* queries_ = nullptr;
  float k_factors_[kTileDepth];
  float v_factors_[kTileDepth];
};

}  // namespace
}  // namespace cpattn::kernels
