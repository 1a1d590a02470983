// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values as tiles. Needs the vector layer and the tiles included first.
#include "kernels/amx/steps-inl.h"

namespace cpattn::kernels {
namespace {

template <class T>
class TileRows {
  static constexpr int kParts = TileFormat<T>::kParts;

 public:
  /// `depth` is the dimension of keys, filled up to whole tiles.
  TileRows(const AttentionTile& tile, const AmxWorkspace<T>& work, int depth)
      : tile_(tile), work_(work), depth_(depth) {}

  void pack(SourceRows<T>& rows) {
    num_special_ = 0;
    magnitude_ = {};
    for (int key = 0; key < rows.count(); key += kTileDepth) {
      const int n = static_cast<int>(smaller(kTileDepth, rows.count() - key));
      if (tile_.expand == nullptr) {
        pack_chunk(rows, key, n, rows.k + key, rows.v + key);
        continue;
      }
      const char* k[kTileDepth];
      const char* v[kTileDepth];
      for (int i = 0; i < n; ++i) {
        T* row = work_.expanded + i * tile_.nope_dim;
        tile_.expand(rows.k[key + i], row);
        k[i] = v[i] = reinterpret_cast<const char*>(row);
        if (i % 4 == 3) keep_tiles_awake();
      }
      pack_chunk(rows, key, n, k, v);
    }
  }

  /// Whether scores of the packed keys and queries as bounded are finite.
  bool bounded() const { return magnitude_.below(kBoundOfFiniteScores); }

  /// The first column tile of the values of a chunk.
  Bfloat16* values_of(int chunk) const {
    constexpr int kChunks = kAmxChunks<T>;
    const int64_t block = chunk / kChunks * kChunks;
    return work_.values +
           (block * (tile_.v_head_dim / 16) + chunk % kChunks) * kParts * kTileElements;
  }

  /// Packed keys whose values are not all finite. Zero times an infinity is NaN, so
  /// they must not meet the rows that do not see them: zeros stand in for them.
  int num_special() const { return num_special_; }
  int special_key(int i) const { return special_keys_[i]; }
  /// Valid until the next call.
  const T* special_value(int i) const {
    if (tile_.expand == nullptr) return reinterpret_cast<const T*>(special_values_[i]);
    tile_.expand(special_values_[i], work_.expanded);
    return work_.expanded;
  }

 private:
  /// Packs n keys from `key` on, whose rows are k and v.
  void pack_chunk(const SourceRows<T>& rows, int key, int n, const char* const* k, const char** v) {
    Bfloat16* keys = work_.keys + int64_t{key} * depth_ * kParts;
    pack_tile_keys<T>(k, n, tile_.nope_dim, 0, depth_, keys, magnitude_);
    if (tile_.rope_dim > 0) {
      pack_tile_keys<T>(
          rows.k_rope + key, n, tile_.rope_dim, tile_.nope_dim, depth_, keys, magnitude_
      );
    }
    Bfloat16* values = values_of(key / kTileDepth);
    int special[kTileDepth];
    const int found = pack_tile_values<T>(v, n, tile_.v_head_dim, values, special);
    if (found == 0) return;
    for (int i = 0; i < found; ++i) {
      const char*& value = v[special[i]];
      special_keys_[num_special_] = key + special[i];
      special_values_[num_special_++] = tile_.expand == nullptr ? value : rows.k[key + special[i]];
      value = reinterpret_cast<const char*>(work_.zeros);
    }
    pack_tile_values<T>(v, n, tile_.v_head_dim, values, special);
  }

  const AttentionTile& tile_;
  const AmxWorkspace<T>& work_;
  const int depth_;
  Magnitude magnitude_;
  int num_special_ = 0;
  int special_keys_[kMaxPackedKeys];
  const char* special_values_[kMaxPackedKeys];  // as they are stored
};

}  // namespace
}  // namespace cpattn::kernels
