// SPDX-License-Identifier: Apache-2.0
#pragma once

// The keys that a token of a tile sees. Nothing here depends on the instruction set.
#include "kernels/rows/tile-inl.h"

namespace cpattn::kernels {
namespace {

/// Half-open range of keys.
struct KeyRange {
  int64_t begin, end;
};

inline KeyRange visible_keys(const AttentionTile& tile, int64_t token) {
  const int64_t position = tile.first_position + token * tile.position_step;
  return {
      larger(tile.kv_begin, position - tile.left),
      larger(0, smaller(tile.kv_len, position + tile.right + 1))
  };
}

inline bool sees(const AttentionTile& tile, int64_t token, int64_t key) {
  const KeyRange range = visible_keys(tile, token);
  if (key < range.begin || key >= range.end) return false;
  return tile.mask == nullptr ||
         (tile.mask[token * tile.mask_stride + key / 8] >> key % 8 & 1) != 0;
}

/// 32 bits of a token's mask, those of keys [key, key + 32); key is a multiple of 32.
inline uint32_t mask_word(const AttentionTile& tile, int64_t token, int64_t key) {
  uint32_t word;
  __builtin_memcpy(&word, tile.mask + token * tile.mask_stride + key / 8, sizeof word);
  return word;
}

/// Whether the mask, if there is one, shows any of keys [key, key + n) to any of
/// tokens [token, end_token). key is a multiple of 32, and whole words count.
inline bool any_shown(
    const AttentionTile& tile, int64_t token, int64_t end_token, int64_t key, int n
) {
  if (tile.mask == nullptr) return true;
  for (; token < end_token; ++token) {
    for (int i = 0; i < n; i += 32) {
      if (mask_word(tile, token, key + i) != 0) return true;
    }
  }
  return false;
}

/// Narrows the range of keys first + begin to first + end, multiples of 32, to what
/// the mask does not hide from all of the tokens.
inline void drop_hidden(
    const AttentionTile& tile, int64_t token, int64_t end_token, int64_t first, int& begin, int& end
) {
  while (begin < end && !any_shown(tile, token, end_token, first + begin, 32)) begin += 32;
  while (begin < end && !any_shown(tile, token, end_token, first + end - 32, 32)) end -= 32;
}

}  // namespace
}  // namespace cpattn::kernels
