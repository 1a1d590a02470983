// SPDX-License-Identifier: Apache-2.0
#pragma once

// Changes to the scores of a step before softmax: masks, softcap, NaN. Needs the vector layer and
// the tiles included first.
#include "kernels/attention/amx/steps-inl.h"

namespace cpattn::kernels {
namespace {

/// Bit i: the token sees key + i. `key` is a multiple of 32.
inline uint32_t visible_bits(const AttentionTile& tile, int64_t token, int64_t key) {
  const KeyRange seen = visible_keys(tile.seen, token);
  const auto bits_below = [&](int64_t limit) {
    return (uint64_t{1} << larger(0, smaller(kTileDepth, limit - key))) - 1;
  };
  auto bits = static_cast<uint32_t>(bits_below(seen.end) & ~bits_below(seen.begin));
  if (tile.seen.mask != nullptr && bits != 0) bits &= mask_word(tile.seen, token, key);
  return bits;
}

/// Exchanges rows and columns of the tiles of a step's scores.
inline void transpose_scores(int rows, float* scores) {
  for (int keys = 0; keys < 2; ++keys) {
    for (int row = 0; row < rows; row += kTileRows) {
      float* tile = scores + keys * kNextKeys + row * kLanes;
      Vector block[kTileRows];
      for (int i = 0; i < kTileRows; ++i) block[i] = load(tile + i * kLanes);
      transpose(block);
      for (int i = 0; i < kTileRows; ++i) store(tile + i * kLanes, block[i]);
    }
  }
}

/// Multiplies the scores of 32 keys with their factors.
inline void multiply_scores(int rows, const float* factors, float* scores) {
  const Vector first = load(factors);
  const Vector next = load(factors + kLanes);
  for (int i = 0; i < rows; ++i) {
    float* x = scores + score_offset(i);
    store(x, mul(load(x), first));
    store(x + kNextKeys, mul(load(x + kNextKeys), next));
    if (i % 4 == 3) keep_tiles_awake();
  }
}

/// Applies softcap, after `scale`, and sets the scores of keys that a row does not see to -inf.
/// `first` is the first of the packed keys.
inline void restrict_scores(
    const AttentionTile& tile, const Step& step, int64_t first, float scale, float* scores
) {
  const int64_t key = first + int64_t{step.chunk} * kTileDepth;
  if (tile.seen.mask == nullptr && tile.softcap == 0 &&
      visible_keys(tile.seen, (step.row + step.count - 1) / tile.group).begin <= key &&
      visible_keys(tile.seen, step.row / tile.group).end >= key + kTileDepth) {
    return;
  }
  for (int i = 0; i < step.count; ++i) {
    const uint32_t bits = visible_bits(tile, (step.row + i) / tile.group, key);
    for (int half = 0; half < 2; ++half) {
      float* x = scores + score_offset(i) + half * kNextKeys;
      if (tile.softcap > 0) apply_softcap(x, 0, kLanes, scale, tile.softcap);
      store(x, select(bits >> half * kLanes, load(x), splat(-__builtin_inff())));
    }
    if (i % 4 == 3) keep_tiles_awake();
  }
}

/// Infinity for scores that are NaN: both make a row NaN, but probabilities may hide it.
inline void show_nan(int rows, float* scores) {
  for (int i = 0; i < rows; ++i) {
    for (int half = 0; half < 2; ++half) {
      float* x = scores + score_offset(i) + half * kNextKeys;
      const Vector score = load(x);
      const __mmask16 nan = _mm512_cmp_ps_mask(score, score, _CMP_UNORD_Q);
      store(x, select(nan, splat(__builtin_inff()), score));
    }
    if (i % 4 == 3) keep_tiles_awake();
  }
}

/// Updates the largest scores of rows, [row][16].
inline void keep_maxima(int rows, const float* scores, float* maxima) {
  for (int i = 0; i < rows; ++i, maxima += kLanes) {
    const float* x = scores + score_offset(i);
    store(maxima, max(load(maxima), max(load(x), load(x + kNextKeys))));
  }
}

/// Applies factors, NaN, softcap, mask and maxima to the scores of a step, in this order. `factors`
/// are those of its keys, or null; `nan` says that a score may be NaN and would be hidden.
template <class T>
void prepare_scores(
    const AttentionTile& tile,
    const Step& step,
    int64_t first,
    float scale,
    const float* factors,
    bool nan,
    float* maxima,
    float* scores
) {
  if (factors != nullptr) multiply_scores(step.count, factors, scores);
  if constexpr (TileFormat<T>::kHidesNan) {
    if (nan) show_nan(step.count, scores);
  }
  restrict_scores(tile, step, first, scale, scores);
  if (tile.results.max_logits != nullptr) keep_maxima(step.count, scores, maxima);
}

}  // namespace
}  // namespace cpattn::kernels
