// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values as tiles. Needs the vector layer and the tiles included first.
#include "kernels/attention/amx/source_rows-inl.h"
#include "kernels/attention/amx/tile_buffers-inl.h"
#include "kernels/engines/amx/codes-inl.h"

namespace cpattn::kernels {
namespace {

/// The order of the tiles of values of a block: by sixteen columns, for products; by chunks, as
/// they are packed; or one chunk only.
enum class ValueOrder { kColumns, kChunks, kOneChunk };

/// Packs the rows of a block in chunks of 32 keys.
template <class T>
class TileRows {
  static constexpr int kParts = TileFormat<T>::kParts;

 public:
  /// `depth` is the dimension of keys, padded to whole tiles.
  TileRows(const AttentionTile& tile, const TileBuffers<T>& work, int depth, ValueOrder order)
      : tile_(tile), work_(work), depth_(depth), order_(order) {}

  /// Packs all chunks of the rows, keys on the right.
  void pack(const SourceRows<T>& rows) {
    begin(rows);
    for (int key = 0; key < rows.count(); key += kTileDepth) {
      const int chunk = key / kTileDepth;
      if (tile_.expand == nullptr) {
        pack_keys<KeySide::kRight>(rows, chunk, keys_of(chunk), [] {});
        pack_values(rows, chunk, [] {});
        continue;
      }
      const int n = static_cast<int>(smaller(kTileDepth, rows.count() - key));
      const char* expanded[kTileDepth];
      expand_rows(rows.k + key, n, expanded);
      place_keys<KeySide::kRight>(expanded, n, tile_.nope_dim, 0, keys_of(chunk), [] {});
      if (tile_.rope_dim > 0) place_ropes<KeySide::kRight>(rows, key, n, keys_of(chunk));
      place_values(expanded, n, chunk, rows.k + key, [] {});
    }
  }

  /// Begins with rows whose chunks will be packed.
  void begin(const SourceRows<T>& rows) {
    num_special_ = 0;
    magnitude_ = {};
    if (has_factors(tile_.codes.v_factors)) {
      rows.read_row_factors(tile_.codes.v_factors, v_factors_);
    }
  }

  /// Packs the keys of a chunk into `tiles`, [16 keys][part][depth / 32][tile] twice. On the
  /// left side calls each() after every four keys.
  template <KeySide kSide, class Each>
  void pack_keys(const SourceRows<T>& rows, int chunk, Bfloat16* tiles, Each each) {
    const int key = chunk * kTileDepth;
    const int n = static_cast<int>(smaller(kTileDepth, rows.count() - key));
    if (kSide == KeySide::kLeft && takes_codes_of(tile_.nope_dim, 0)) {
      place_codes(rows.k + key, n, tile_.nope_dim, 0, tiles, each);
      if (tile_.rope_dim > 0) place_ropes<kSide>(rows, key, n, tiles);
      return;
    }
    const char* expanded[kTileDepth];
    const char* const* k = expanded;
    if (tile_.expand != nullptr) {
      expand_rows(rows.k + key, n, expanded);
    } else if (tile_.codes.expand != nullptr) {
      expand(rows.k + key, n, tile_.nope_dim, nullptr, expanded);
    } else {
      k = rows.k + key;
    }
    place_keys<kSide>(k, n, tile_.nope_dim, 0, tiles, each);
    if (tile_.rope_dim > 0) place_ropes<kSide>(rows, key, n, tiles);
  }

  /// Packs the values of a chunk; calls each() after every four keys.
  template <class Each>
  void pack_values(const SourceRows<T>& rows, int chunk, Each each) {
    const int key = chunk * kTileDepth;
    const int n = static_cast<int>(smaller(kTileDepth, rows.count() - key));
    const char* const* stored = (tile_.expand != nullptr ? rows.k : rows.v) + key;
    const char* v[kTileDepth];
    if (tile_.expand != nullptr) {
      expand_rows(stored, n, v);
    } else if (tile_.codes.expand != nullptr && !packs_codes_of_values()) {
      expand(stored, n, tile_.v_head_dim, v_factors_of(key), v);
    } else {
      for (int i = 0; i < n; ++i) v[i] = stored[i];
    }
    place_values(v, n, chunk, stored, each);
  }

  /// Whether scores of the packed keys with equally bounded queries are finite.
  bool bounded() const { return magnitude_.below(kBoundOfFiniteScores); }

  Bfloat16* keys_of(int chunk) const {
    return work_.keys + int64_t{chunk} * kTileDepth * depth_ * kParts;
  }

  /// The first column tile of the values of a chunk.
  Bfloat16* values_of(int chunk) const {
    const int columns = tile_.v_head_dim / 16;
    if (order_ == ValueOrder::kOneChunk) return work_.values;
    if (order_ == ValueOrder::kChunks) {
      return work_.values + int64_t{chunk} * columns * kParts * kTileElements;
    }
    constexpr int kChunks = kAmxChunks<T>;
    const int64_t block = chunk / kChunks * kChunks;
    return work_.values + (block * columns + chunk % kChunks) * kParts * kTileElements;
  }
  /// The distance from one column tile to the next.
  int64_t column_stride() const {
    const int tiles = order_ == ValueOrder::kColumns ? kAmxChunks<T> : 1;
    return int64_t{tiles} * kParts * kTileElements;
  }
  /// The distance from one chunk of a block to the next.
  int64_t chunk_stride() const {
    const int tiles = order_ == ValueOrder::kChunks ? tile_.v_head_dim / 16 : 1;
    return int64_t{tiles} * kParts * kTileElements;
  }

  /// Packed keys whose values are not all finite. Zero times an infinity is NaN, so
  /// they must not meet the rows that do not see them: zeros stand in for them.
  int num_special() const { return num_special_; }
  int special_key(int i) const { return special_keys_[i]; }
  /// Empties the list, before values are packed again.
  void forget_special() { num_special_ = 0; }
  /// Valid until the next call.
  const T* special_value(int i) const {
    const char* value[1];
    if (tile_.codes.expand != nullptr) {
      expand(&special_values_[i], 1, tile_.v_head_dim, v_factors_of(special_keys_[i]), value);
    } else if (tile_.expand != nullptr) {
      expand_rows(&special_values_[i], 1, value);
    } else {
      value[0] = special_values_[i];
    }
    return reinterpret_cast<const T*>(value[0]);
  }

 private:
  const float* v_factors_of(int key) const {
    return has_factors(tile_.codes.v_factors) ? v_factors_ + key : nullptr;
  }

  /// Whether codes become tiles directly, without rows of numbers in between.
  bool takes_codes_of(int dim, int first) const {
    return kParts == 1 && tile_.codes.expand != nullptr && takes_codes(dim, first);
  }
  bool packs_codes_of_values() const {
    return takes_codes_of(tile_.v_head_dim, 0) && !has_factors(tile_.codes.v_factors);
  }

  /// Calls function<Code>() for the type of the codes.
  template <class Function>
  void with_code(Function function) const {
    switch (tile_.codes.type) {
      case kFloat8E4M3:
        return function.template operator()<Float8>();
      case kFloat8E5M2:
        return function.template operator()<Float8E5M2>();
      default:
        return function.template operator()<int8_t>();
    }
  }

  /// Places `dim` dimensions of n keys that are codes, from dimension `first` on, as left-hand
  /// tiles.
  template <class Each>
  void place_codes(const char* const* rows, int n, int dim, int first, Bfloat16* tiles, Each each) {
    if constexpr (kParts == 1) {
      const char* all[kTileDepth];
      for (int i = 0; i < kTileDepth; ++i) all[i] = i < n ? rows[i] : kZeroRow;
      with_code([&]<class Code> {
        const bool finite = pack_code_rows<Code>(all, dim, first, depth_, tiles, each);
        if (!finite) magnitude_.add(_mm512_set1_epi16(TileFormat<T>::kInfinity));
      });
    }
  }

  /// Expands rows of codes to numbers, and lists their addresses.
  void expand(
      const char* const* rows, int n, int dim, const float* factors, const char** expanded
  ) const {
    tile_.codes.expand(rows, n, dim, factors, work_.expanded);
    for (int i = 0; i < n; ++i) {
      expanded[i] = reinterpret_cast<const char*>(work_.expanded + int64_t{i} * dim);
    }
  }

  /// Expands rows that are stored in another form, whose first dimensions are their values.
  void expand_rows(const char* const* rows, int n, const char** expanded) const {
    for (int i = 0; i < n; ++i) {
      T* row = work_.expanded + int64_t{i} * tile_.nope_dim;
      tile_.expand(rows[i], row);
      expanded[i] = reinterpret_cast<const char*>(row);
      if (i % 4 == 3) keep_tiles_awake();
    }
  }

  /// Packs `dim` dimensions of n keys, from dimension `first` on.
  template <KeySide kSide, class Each>
  void place_keys(const char* const* rows, int n, int dim, int first, Bfloat16* tiles, Each each) {
    if constexpr (kSide == KeySide::kRight) {
      pack_tile_keys<T>(rows, n, dim, first, depth_, tiles, magnitude_);
      return;
    }
    const char* all[kTileDepth];
    for (int i = 0; i < kTileDepth; ++i) all[i] = i < n ? rows[i] : kZeroRow;
    pack_tile_rows<T>(all, dim, first, depth_, tiles, magnitude_, each);
  }

  /// Packs the rope parts of n keys from `key` on.
  template <KeySide kSide>
  void place_ropes(const SourceRows<T>& rows, int key, int n, Bfloat16* tiles) {
    const char* expanded[kTileDepth];
    const char* const* ropes = rows.k_rope + key;
    if (kSide == KeySide::kLeft && takes_codes_of(tile_.rope_dim, tile_.nope_dim)) {
      return place_codes(ropes, n, tile_.rope_dim, tile_.nope_dim, tiles, [] {});
    }
    if (tile_.codes.expand != nullptr) {
      expand(ropes, n, tile_.rope_dim, nullptr, expanded);
      ropes = expanded;
    }
    place_keys<kSide>(ropes, n, tile_.rope_dim, tile_.nope_dim, tiles, [] {});
  }

  /// Packs the n values of a chunk from `stored`.
  template <class Each>
  void place_values(const char** v, int n, int chunk, const char* const* stored, Each each) {
    int special[kTileDepth];
    const int found = write_values(v, n, values_of(chunk), special, each);
    if (found == 0) return;
    for (int i = 0; i < found; ++i) {
      special_keys_[num_special_] = chunk * kTileDepth + special[i];
      special_values_[num_special_++] = stored[special[i]];
      v[special[i]] = reinterpret_cast<const char*>(work_.zeros);
    }
    write_values(v, n, values_of(chunk), special, [] {});
  }

  /// Packs n values, or the codes of values, at v; see pack_tile_values().
  template <class Each>
  int write_values(const char* const* v, int n, Bfloat16* tiles, int* special, Each each) const {
    const int dim = tile_.v_head_dim;
    if constexpr (kParts == 1) {
      if (packs_codes_of_values()) {
        int found = 0;
        with_code([&]<class Code> {
          found = pack_code_values<Code>(v, n, dim, tiles, column_stride(), special, each);
        });
        return found;
      }
    }
    return pack_tile_values<T>(v, n, dim, tiles, column_stride(), special, each);
  }

  const AttentionTile& tile_;
  const TileBuffers<T>& work_;
  const int depth_;
  const ValueOrder order_;
  Magnitude magnitude_;
  int num_special_ = 0;
  int special_keys_[kMaxPackedKeys];
  const char* special_values_[kMaxPackedKeys];  // as they are stored
  float v_factors_[kMaxPackedKeys];
};

}  // namespace
}  // namespace cpattn::kernels
