// SPDX-License-Identifier: Apache-2.0
#pragma once

// A block of keys with its K and V packed for an engine's products.
#include "kernels/engines/gemm-inl.h"
#include "kernels/rows/padded_rows-inl.h"
#include "kernels/rows/row_factors-inl.h"

namespace cpattn::kernels {
namespace {

template <class T, class Engine>
class KeyBlock {
  using Operand = typename Engine::Operand;

 public:
  /// `keys` and `values` have room for block_keys keys, `expanded` for the keys, rope parts and
  /// values of a granule; `zeros` holds v_head_dim zeros.
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
        expanded_keys_(reinterpret_cast<T*>(expanded)),
        expanded_ropes_(expanded_keys_ + int64_t{kKeyGranule} * tile.nope_dim),
        expanded_values_(expanded_ropes_ + int64_t{kKeyGranule} * tile.rope_dim),
        zeros_(reinterpret_cast<const char*>(zeros)) {}

  /// Packs keys [first, first + n) of a KV head, and prefetches the next keys below `end`. No token
  /// sees the first `hidden` keys.
  void pack(int head, int64_t first, int n, int hidden, int64_t end) {
    first_ = first;
    count_ = n;
    num_special_ = 0;
    known_ = static_cast<int>(smaller(n + kKeyGranule, end - first));
    const bool read = reads_rows();
    if (read || tile_.expand != nullptr) {
      locate(tile_.k, head, hidden, stored_k_);
      const T* values = read ? expanded_values_ : expanded_keys_;
      const int value_dim = read ? tile_.v_head_dim : tile_.nope_dim;
      for (int i = 0; i < round_up(n, kKeyGranule) + kKeyGranule; ++i) {
        const int64_t row = i % kKeyGranule;
        k_[i] = reinterpret_cast<const char*>(expanded_keys_ + row * tile_.nope_dim);
        k_rope_[i] = reinterpret_cast<const char*>(expanded_ropes_ + row * tile_.rope_dim);
        v_[i] = reinterpret_cast<const char*>(values + row * value_dim);
      }
    } else {
      locate(tile_.k, head, hidden, k_);
      locate(tile_.v, head, hidden, v_);
    }
    if (read) locate(tile_.v, head, hidden, stored_v_);
    if (tile_.rope_dim > 0) locate(tile_.k_rope, head, hidden, read ? stored_rope_ : k_rope_);
    if (has_factors(tile_.codes.k_factors)) {
      read_factors(tile_, tile_.codes.k_factors, head, first, n, hidden, k_factors_);
    }
    if (has_factors(tile_.codes.v_factors)) {
      read_factors(tile_, tile_.codes.v_factors, head, first, n, hidden, v_factors_);
    }
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

  /// Keys whose values are not all finite. They are packed as zeros: zero times an infinity is NaN,
  /// and rows that do not see them must not meet them.
  int num_special() const { return num_special_; }
  int special_key(int i) const { return special_keys_[i]; }
  /// Valid until the next call.
  const T* special_value(int i) const {
    if (reads_rows()) {
      read_values(&special_values_[i], special_keys_[i], 1);
      return expanded_values_;
    }
    if (tile_.expand == nullptr) return reinterpret_cast<const T*>(special_values_[i]);
    tile_.expand(special_values_[i], expanded_keys_);
    return expanded_keys_;
  }

  /// The factors of the scores of the keys, or null.
  const float* k_factors() const {
    return has_factors(tile_.codes.k_factors) ? k_factors_ : nullptr;
  }

 private:
  /// Whether K, its rope part and V are expanded to numbers of all dimensions before packing.
  bool reads_rows() const {
    return tile_.codes.expand != nullptr || (tile_.expand == nullptr && is_padded(tile_));
  }

  void locate(const PagedRows& source, int head, int hidden, const char** rows) const {
    const int bytes = element_bytes<T>(tile_);
    locate_visible_rows(
        rows_of_head(source, head, bytes), tile_, first_, known_, hidden, bytes, rows
    );
    stand_in(rows, known_, round_up(count_, kKeyGranule) + kKeyGranule, known_ - 1);
  }

  void expand_granule(int begin, int end) const {
    for (int key = begin; key < end; ++key) {
      fetch_row<2>(stored_k_[key + kKeyGranule], tile_.stored_bytes);
      tile_.expand(stored_k_[key], expanded_keys_ + int64_t{key - begin} * tile_.nope_dim);
    }
  }

  /// Turns codes into numbers, those of values times their factors; rows get all dimensions.
  void read_granule(int begin, int end) const {
    for (int key = begin; key < end; ++key) {
      fetch_row<2>(stored_k_[key + kKeyGranule], tile_.nope_dim * element_bytes<T>(tile_));
      fetch_row<2>(stored_v_[key + kKeyGranule], tile_.v_head_dim * element_bytes<T>(tile_));
    }
    const int n = end - begin;
    const StoredDims& stored = tile_.stored;
    read_rows(stored_k_ + begin, n, stored.nope_dim, tile_.nope_dim, nullptr, expanded_keys_);
    if (tile_.rope_dim > 0) {
      read_rows(stored_rope_ + begin, n, stored.rope_dim, tile_.rope_dim, nullptr, expanded_ropes_);
    }
    read_values(stored_v_ + begin, begin, n);
  }

  /// Reads the values of n keys from `key` on.
  void read_values(const char* const* rows, int key, int n) const {
    const float* factors = has_factors(tile_.codes.v_factors) ? v_factors_ + key : nullptr;
    read_rows(rows, n, tile_.stored.v_head_dim, tile_.v_head_dim, factors, expanded_values_);
  }

  /// numbers[i * dim + j] = dimension j of rows[i], times factors[i] if it is a code and there are
  /// factors. For padded tiles memory has only the first stored_dim.
  void read_rows(
      const char* const* rows, int n, int stored_dim, int dim, const float* factors, T* numbers
  ) const {
    if (tile_.codes.expand == nullptr) {
      for (int i = 0; i < n; ++i) {
        copy_padded(rows[i], stored_dim * sizeof(T), dim * sizeof(T), numbers + int64_t{i} * dim);
      }
      return;
    }
    // The code 0 is the number 0 in all formats.
    char copies[kKeyGranule * kMaxHeadDim];
    const char* codes[kKeyGranule];
    const PaddedRows padded(tile_, stored_dim, dim, 1, copies);
    for (int i = 0; i < n; ++i) codes[i] = padded.read(rows[i], i);
    tile_.codes.expand(codes, n, dim, factors, numbers);
  }

  /// The address at which the value of a key is stored.
  const char* stored_value(int key) const {
    if (reads_rows()) return stored_v_[key];
    return tile_.expand == nullptr ? v_[key] : stored_k_[key];
  }

  void pack_granule(int begin) {
    const int end = static_cast<int>(smaller(begin + kKeyGranule, count_));
    if (tile_.expand != nullptr) expand_granule(begin, end);
    if (reads_rows()) read_granule(begin, end);
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
      special_values_[num_special_++] = stored_value(key);
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
  T* const expanded_keys_;  // of a granule
  T* const expanded_ropes_;
  T* const expanded_values_;
  const char* const zeros_;
  int64_t first_ = 0;
  int count_ = 0;
  int known_ = 0;  // keys of the block and after it whose rows are known
  // Addresses of rows, and of one granule more, which engines may prefetch.
  const char* k_[kMaxBlockKeys + kKeyGranule];
  const char* k_rope_[kMaxBlockKeys + kKeyGranule];
  const char* v_[kMaxBlockKeys + kKeyGranule];
  // Addresses for expand() and read_rows().
  const char* stored_k_[kMaxBlockKeys + kKeyGranule];
  const char* stored_rope_[kMaxBlockKeys + kKeyGranule];
  const char* stored_v_[kMaxBlockKeys + kKeyGranule];
  float k_factors_[kMaxBlockKeys];
  float v_factors_[kMaxBlockKeys];
  int num_special_ = 0;
  int special_keys_[kMaxBlockKeys];
  const char* special_values_[kMaxBlockKeys];
};

}  // namespace
}  // namespace cpattn::kernels
