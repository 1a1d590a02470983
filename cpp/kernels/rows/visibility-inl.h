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

/// The key position of a token.
inline int64_t position_of(const TileVisibility& seen, int64_t token) {
  return seen.first_position + token * seen.position_step;
}

inline KeyRange visible_keys(const TileVisibility& seen, int64_t token) {
  const int64_t position = position_of(seen, token);
  KeyRange keys = {
      larger(seen.kv_begin, position - seen.left),
      larger(0, smaller(seen.kv_len, position + seen.right + 1))
  };
  if (seen.key_ranges != nullptr) {
    keys.begin = larger(keys.begin, seen.key_ranges[2 * token]);
    keys.end = smaller(keys.end, seen.key_ranges[2 * token + 1]);
  }
  return keys;
}

/// The keys that tokens of a tile see: the first one of the first token to the last of the last.
inline KeyRange keys_of_tile(const AttentionTile& tile) {
  const int64_t begin = visible_keys(tile.seen, 0).begin;
  return {begin, visible_keys(tile.seen, tile.num_tokens - 1).end};
}

inline bool sees(const TileVisibility& seen, int64_t token, int64_t key) {
  const KeyRange range = visible_keys(seen, token);
  if (key < range.begin || key >= range.end) return false;
  return seen.mask == nullptr ||
         (seen.mask[token * seen.mask_stride + key / 8] >> key % 8 & 1) != 0;
}

/// The 32 bits of a token's mask for keys [key, key + 32); key is a multiple of 32.
inline uint32_t mask_word(const TileVisibility& seen, int64_t token, int64_t key) {
  uint32_t word;
  __builtin_memcpy(&word, seen.mask + token * seen.mask_stride + key / 8, sizeof word);
  return word;
}

/// Whether the mask, if there is one, shows any of keys [key, key + n) to any of
/// tokens [token, end_token). key is a multiple of 32, and whole words count.
inline bool any_shown(
    const TileVisibility& seen, int64_t token, int64_t end_token, int64_t key, int n
) {
  if (seen.mask == nullptr) return true;
  for (; token < end_token; ++token) {
    for (int i = 0; i < n; i += 32) {
      if (mask_word(seen, token, key + i) != 0) return true;
    }
  }
  return false;
}

/// Narrows the range of keys first + begin to first + end, multiples of 32, to the words of the
/// mask that show a key to some token.
inline void drop_hidden(
    const TileVisibility& seen,
    int64_t token,
    int64_t end_token,
    int64_t first,
    int& begin,
    int& end
) {
  while (begin < end && !any_shown(seen, token, end_token, first + begin, 32)) begin += 32;
  while (begin < end && !any_shown(seen, token, end_token, first + end - 32, 32)) end -= 32;
}

}  // namespace
}  // namespace cpattn::kernels
