// SPDX-License-Identifier: Apache-2.0
#pragma once

// Biases of scores before softmax: numbers in memory, slopes over distance (ALiBi), tables over
// distance (T5). Needs the vector layer included first.
#include "kernels/softmax/hidden_keys-inl.h"
#include "kernels/softmax/softmax-inl.h"

namespace cpattn::kernels {
namespace {

/// Adds n numbers, `stride` apart, to sums; after these kLanes floats are writable.
template <class T>
void add_numbers(const T* numbers, int64_t stride, int n, float* sums) {
  for (int i = 0; i < n; i += kLanes) {
    T copies[kLanes] = {};
    const T* source = numbers + i;
    if (stride != 1 || i + kLanes > n) {
      for (int j = 0; j < kLanes && i + j < n; ++j) copies[j] = numbers[(i + j) * stride];
      source = copies;
    }
    store(sums + i, add(load(sums + i), load(source)));
  }
}

inline void add_numbers(
    const TileBias& bias, int64_t row, int64_t head, int64_t column, int n, float* sums
) {
  const int64_t offset =
      row * bias.token_stride + head * bias.head_stride + column * bias.key_stride;
  const auto add_of = [&]<class T>(const T* numbers) {
    add_numbers(numbers + offset, bias.key_stride, n, sums);
  };
  if (bias.type == kFloat32) {
    add_of(static_cast<const float*>(bias.numbers));
  } else if (bias.type == kFloat16) {
    add_of(static_cast<const Half*>(bias.numbers));
  } else {
    add_of(static_cast<const Bfloat16*>(bias.numbers));
  }
}

/// Counts how many of n keys, from `key` on, follow each other in their sequence; n is at least 1.
inline int count_neighbours(const TileBias& bias, int64_t key, int n) {
  if (bias.key_positions == nullptr) return n;
  const int32_t* positions = bias.key_positions + key;
  if (positions[n - 1] - positions[0] == n - 1) return n;  // they ascend
  int count = 1;
  while (positions[count] - positions[0] == count) ++count;
  return count;
}

/// Adds the biases of a row for keys [key, key + n), which follow each other, to sums; after these
/// kLanes floats are writable.
inline void add_biases_of_neighbours(
    const AttentionTile& tile, int64_t token, int64_t head, int64_t key, int n, float* sums
) {
  const TileBias& bias = tile.bias;
  int64_t row = token, column = key, position = position_of(tile.seen, token);
  if (bias.key_positions != nullptr) {
    position = bias.token_positions[token];
    row = position - bias.first_position;
    column = bias.key_positions[key];
  }
  if (bias.numbers != nullptr) add_numbers(bias, row, head, column, n, sums);
  const int64_t distance = column - position;
  if (bias.alibi_slopes != nullptr) {
    const float slope = bias.alibi_slopes[head];
    const auto first = static_cast<float>(distance);
    for (int j = 0; j < n; ++j) {
      sums[j] -= slope * __builtin_fabsf(first + static_cast<float>(j));
    }
  }
  if (bias.relative_bias == nullptr) return;
  // Distances below the least one of the table, distances in the table, and distances above.
  const int64_t most = bias.max_distance;
  const auto begin = static_cast<int>(larger(0, smaller(n, -most - distance)));
  const auto end = static_cast<int>(larger(begin, smaller(n, most + 1 - distance)));
  const float* numbers = bias.relative_bias + head * bias.relative_bias_head_stride;
  for (int j = 0; j < begin; ++j) sums[j] += numbers[-most];
  add_numbers(numbers + distance + begin, 1, end - begin, sums + begin);
  for (int j = end; j < n; ++j) sums[j] += numbers[most];
}

/// Adds the biases of a row for keys [key, key + n) to sums; after these kLanes floats are
/// writable. The row's window shows the keys.
inline void add_biases(
    const AttentionTile& tile, int64_t token, int64_t head, int64_t key, int n, float* sums
) {
  const TileBias& bias = tile.bias;
  if (bias.key_positions != nullptr && !bias_may_hide(tile)) {
    // Slopes alone do not need keys that follow each other.
    const float slope = bias.alibi_slopes[head];
    const int32_t position = bias.token_positions[token];
    const int32_t* columns = bias.key_positions + key;
    for (int j = 0; j < n; ++j) {
      sums[j] -= slope * __builtin_fabsf(static_cast<float>(columns[j] - position));
    }
    return;
  }
  for (int begin = 0; begin < n;) {
    const int count = count_neighbours(bias, key + begin, n - begin);
    add_biases_of_neighbours(tile, token, head, key + begin, count, sums + begin);
    begin += count;
  }
}

/// Sets the biases of a row for kKeyGranule keys from `key` on; after them kLanes floats are
/// writable. Returns the keys that the row's window shows; the other biases are 0.
inline KeyRange set_biases(
    const AttentionTile& tile, int64_t token, int64_t head, int64_t key, float* biases
) {
  const KeyRange seen = visible_keys(tile.seen, token);
  const int64_t from = larger(0, smaller(kKeyGranule, seen.begin - key));
  const int64_t to = larger(from, smaller(kKeyGranule, seen.end - key));
  __builtin_memset(biases, 0, sizeof(float) * (kKeyGranule + kLanes));
  add_biases(tile, token, head, key + from, static_cast<int>(to - from), biases + from);
  return {from, to};
}

/// Whether biases hide keys first + begin to first + end, multiples of kKeyGranule, from a row,
/// among those that its window shows.
[[gnu::noinline]] inline bool biases_hide(
    const AttentionTile& tile, int64_t token, int64_t head, int64_t first, int begin, int end
) {
  float biases[kKeyGranule + kLanes];
  for (; begin < end; begin += kKeyGranule) {
    const KeyRange shown = set_biases(tile, token, head, first + begin, biases);
    for (int64_t j = shown.begin; j < shown.end; ++j) {
      if (!(biases[j] < -__FLT_MAX__)) return false;
    }
  }
  return true;
}

/// Makes scores of keys first + begin to first + end, multiples of kKeyGranule, scale * score +
/// bias; a bias of -inf makes any score -inf. Scores that the row's window hides become anything.
[[gnu::noinline]] inline void bias_scores(
    const AttentionTile& tile,
    float* scores,
    int64_t token,
    int64_t head,
    int64_t first,
    int begin,
    int end,
    float scale
) {
  const Vector factor = splat(scale);
  const Vector hidden = splat(-__builtin_inff());
  const Vector least = splat(-__FLT_MAX__);
  const Vector lowest = splat(-1e38F);
  float biases[kKeyGranule + kLanes];
  for (; begin < end; begin += kKeyGranule) {
    set_biases(tile, token, head, first + begin, biases);
    for (int j = 0; j < kKeyGranule; j += kLanes) {
      const Vector bias = load(biases + j);
      // A score of finite numbers keeps a finite product with log2(e), however low it is.
      const Vector score = max(lowest, fma(load(scores + begin + j), factor, bias));
      store(scores + begin + j, select(greater(least, bias), hidden, score));
    }
  }
}

/// Applies softcap, bias, window and mask to a row's scores of keys first + begin to first + end.
/// `row` is of KV head `head`, whose factor of scores is `scale`.
inline void finish_scores(
    const AttentionTile& tile,
    float* scores,
    int64_t head,
    int64_t row,
    float scale,
    int64_t first,
    int begin,
    int end,
    bool all_visible
) {
  if (tile.softcap > 0) apply_softcap(scores, begin, end, scale, tile.softcap);
  const int64_t token = row / tile.group;
  if (has_bias(tile)) {
    const int64_t query_head = head * tile.group + row % tile.group;
    const float factor = tile.softcap > 0 ? 1.0F : scale;
    bias_scores(tile, scores, token, query_head, first, begin, end, factor);
  }
  if (!all_visible) hide_keys(tile.seen, scores, token, first, begin, end);
}

/// Whether bias, window and mask let a row see a key. Not inlined, because loops that are short of
/// registers call it rarely.
[[gnu::noinline]] inline bool sees(
    const AttentionTile& tile, int64_t token, int64_t head, int64_t key
) {
  if (!sees(tile.seen, token, key)) return false;
  if (!bias_may_hide(tile)) return true;
  float bias[1 + kLanes] = {};
  add_biases(tile, token, head, key, 1, bias);
  return !(bias[0] < -__FLT_MAX__);
}

}  // namespace
}  // namespace cpattn::kernels
