// SPDX-License-Identifier: Apache-2.0
#pragma once

// A block of keys with its K and V packed for an engine's products.
#include "kernels/attention/gemm-inl.h"
#include "kernels/attention/key_rows-inl.h"

namespace cpattn::kernels {
namespace {

template <class T, class Engine>
class KeyBlock {
  using Operand = typename Engine::Operand;

 public:
  /// `keys` and `values` have room for block_keys keys, `expanded` for a granule of
  /// rows; `zeros` holds v_head_dim zeros.
  KeyBlock(
      const AttentionTile& tile,
      int block_keys,
      Operand* keys,
      Operand* values,
      Operand* expanded,
      const float* zeros
  )
      : tile_(tile),
        keys_(keys),
        values_(values),
        keys_panel_(int64_t{tile.nope_dim + tile.rope_dim} * kPanel),
        values_panel_(int64_t{block_keys} * kPanel),
        expanded_(reinterpret_cast<T*>(expanded)),
        zeros_(reinterpret_cast<const char*>(zeros)) {}

  /// Packs keys [first, first + n), and starts to fetch those that come next below
  /// `end`. The first `hidden` of them no token sees: they may hold anything, NaN
  /// too, so a visible one stands in for them.
  void pack(int64_t first, int n, int hidden, int64_t end) {
    first_ = first;
    count_ = n;
    num_special_ = 0;
    known_ = static_cast<int>(smaller(n + kKeyGranule, end - first));
    if (tile_.expand == nullptr) {
      locate(tile_.k, hidden, k_);
      locate(tile_.v, hidden, v_);
    } else {
      locate(tile_.k, hidden, stored_);
      for (int i = 0; i < round_up(n, kKeyGranule) + kKeyGranule; ++i) {
        k_[i] = v_[i] = reinterpret_cast<const char*>(expanded_row(i));
      }
    }
    if (tile_.rope_dim > 0) locate(tile_.k_rope, hidden, k_rope_);
    for (int key = 0; key < n; key += kKeyGranule) pack_granule(key);
  }

  int64_t first() const { return first_; }
  int count() const { return count_; }
  /// Panels of keys, each [qk_dim][kPanel].
  const Operand* keys() const { return keys_; }
  int64_t keys_panel() const { return keys_panel_; }
  /// Panels of v_head_dim, each [block keys][kPanel].
  const Operand* values() const { return values_; }
  int64_t values_panel() const { return values_panel_; }

  /// Keys whose values are not all finite. They are packed as zeros, because zero
  /// times an infinity is NaN and they must not meet rows that do not see them.
  int num_special() const { return num_special_; }
  int special_key(int i) const { return special_keys_[i]; }
  /// Valid until the next call.
  const T* special_value(int i) const {
    if (tile_.expand == nullptr) return reinterpret_cast<const T*>(special_values_[i]);
    tile_.expand(special_values_[i], expanded_);
    return expanded_;
  }

 private:
  void locate(const PagedRows& source, int hidden, const char** rows) const {
    locate_rows(source, tile_, first_ + hidden, known_ - hidden, sizeof(T), rows + hidden);
    for (int i = 0; i < hidden; ++i) rows[i] = rows[hidden];
    const int fetched = round_up(count_, kKeyGranule) + kKeyGranule;
    for (int i = known_; i < fetched; ++i) rows[i] = rows[known_ - 1];
  }

  T* expanded_row(int key) const { return expanded_ + int64_t{key % kKeyGranule} * tile_.nope_dim; }

  void expand_granule(int begin, int end) const {
    for (int key = begin; key < end; ++key) {
      fetch_row<2>(stored_[key + kKeyGranule], tile_.stored_bytes);
      tile_.expand(stored_[key], expanded_row(key));
    }
  }

  void pack_granule(int begin) {
    const int end = static_cast<int>(smaller(begin + kKeyGranule, count_));
    if (tile_.expand != nullptr) expand_granule(begin, end);
    Engine::template pack_keys<T>(k_, begin, end, tile_.nope_dim, 0, keys_panel_, keys_);
    if (tile_.rope_dim > 0) {
      Engine::template pack_keys<T>(
          k_rope_, begin, end, tile_.rope_dim, tile_.nope_dim, keys_panel_, keys_
      );
    }
    int not_finite[kKeyGranule];
    const int found = pack_values(begin, end, not_finite);
    if (found == 0) return;
    for (int i = 0; i < found; ++i) {
      const int key = not_finite[i];
      special_keys_[num_special_] = key;
      special_values_[num_special_++] = tile_.expand == nullptr ? v_[key] : stored_[key];
      v_[key] = zeros_;
    }
    pack_values(begin, end, not_finite);
  }

  int pack_values(int begin, int end, int* not_finite) {
    return Engine::template pack_values<T>(
        v_, begin, end, tile_.v_head_dim, values_panel_, values_, not_finite
    );
  }

  const AttentionTile& tile_;
  Operand* const keys_;
  Operand* const values_;
  const int64_t keys_panel_, values_panel_;
  T* const expanded_;  // rows of a granule
  const char* const zeros_;
  int64_t first_ = 0;
  int count_ = 0;
  int known_ = 0;  // keys of the block and after it whose rows are known
  // Addresses of rows, with those of one granule more, which engines may fetch ahead.
  const char* k_[kMaxBlockKeys + kKeyGranule];
  const char* k_rope_[kMaxBlockKeys + kKeyGranule];
  const char* v_[kMaxBlockKeys + kKeyGranule];
  const char* stored_[kMaxBlockKeys + kKeyGranule];  // that expand() takes
  int num_special_ = 0;
  int special_keys_[kMaxBlockKeys];
  const char* special_values_[kMaxBlockKeys];
};

}  // namespace
}  // namespace cpattn::kernels
