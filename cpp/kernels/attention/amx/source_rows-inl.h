// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of a head where they are in memory. Needs the vector layer and the tiles included
// first.
#include "kernels/engines/amx/pack-inl.h"
#include "kernels/rows/row_factors-inl.h"

namespace cpattn::kernels {
namespace {

/// The addresses of the keys and values of a head that are packed together.
template <class T>
class SourceRows {
 public:
  explicit SourceRows(const AttentionTile& tile) : tile_(tile) {}

  /// Locates keys [first, first + n) of a head, the first `hidden` of which no token sees.
  void locate(int head, int64_t first, int n, int hidden) {
    head_ = head;
    first_ = first;
    count_ = n;
    hidden_ = fetched_ = hidden;
    const int bytes = element_bytes<T>(tile_);
    const auto locate = [&](const PagedRows& source, const char** rows) {
      locate_visible_rows(rows_of_head(source, head, bytes), tile_, first, n, hidden, bytes, rows);
    };
    locate(tile_.k, k);
    if (tile_.rope_dim > 0) locate(tile_.k_rope, k_rope);
    if (tile_.expand == nullptr) locate(tile_.v, v);
  }

  int head() const { return head_; }
  int64_t first() const { return first_; }
  int count() const { return count_; }
  int hidden() const { return hidden_; }

  /// Reads the factors of the rows of these keys.
  void read_row_factors(const RowFactors& source, float* factors) const {
    read_factors(tile_, source, head_, first_, count_, hidden_, factors);
  }

  /// Prefetches the next n keys and their values to the L2. In a cache of many heads they are too
  /// far apart for hardware prefetch, and packing would wait for them.
  void fetch(int n) {
    const int bytes = element_bytes<T>(tile_);
    for (; n > 0 && fetched_ < count_; --n, ++fetched_) {
      fetch_row<2>(k[fetched_], stored_key_bytes<T>(tile_));
      if (tile_.rope_dim > 0) fetch_row<2>(k_rope[fetched_], tile_.rope_dim * bytes);
      if (tile_.expand == nullptr) fetch_row<2>(v[fetched_], tile_.v_head_dim * bytes);
    }
  }

  const char* k[kMaxPackedKeys];
  const char* k_rope[kMaxPackedKeys];
  const char* v[kMaxPackedKeys];

 private:
  const AttentionTile& tile_;
  int head_ = 0;
  int64_t first_ = 0;
  int count_ = 0;
  int hidden_ = 0;
  int fetched_ = 0;
};

}  // namespace
}  // namespace cpattn::kernels
