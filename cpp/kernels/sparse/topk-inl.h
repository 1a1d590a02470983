// SPDX-License-Identifier: Apache-2.0
#pragma once

// Exact selection of the k largest scores of a stream. A buffer collects scores above a threshold;
// when it is full, the k best stay and the smallest of these becomes the threshold. Indices must
// ascend: then a later score equal to the threshold loses against k earlier ones, and every tie
// goes to the smaller index.
//
// Needs a vector layer included first.
#include <stdint.h>
#include <string.h>

namespace cpattn::kernels {
namespace {

/// Scores that are compared together; capacities and loop counts are multiples of it.
constexpr int kTopkStep = 4 * kLanes;

/// One below the key (see topk_key) of -inf, and so of every score.
constexpr int64_t kTopkBottom = int64_t{static_cast<int32_t>(0x807fffff)} - 1;

struct TopkStream {
  float* scores;     // [capacity] ascending by index; never NaN
  int32_t* indices;  // [capacity]
  int32_t capacity;  // topk_capacity(k), or any larger multiple of kTopkStep
  int32_t k;         // >= 1
  int32_t count = 0;
  float threshold = -__builtin_inff();
  bool admits_all = true;       // until a threshold is known: -inf competes, too
  int64_t below = kTopkBottom;  // the key of the threshold: k scores of a full buffer exceed it
};

/// Entries of the buffers of a stream. A larger buffer shrinks less often.
inline int64_t topk_capacity(int64_t k) {
  return (k + k / 2 + kTopkStep - 1) / kTopkStep * kTopkStep + kTopkStep;
}

/// Bytes of scratch that topk_finish sorts in.
inline int64_t topk_sort_bytes(int64_t k) { return k * 2 * static_cast<int64_t>(sizeof(uint64_t)); }

// Floats are ordered as integers of this kind; -0 is one below +0.
inline int32_t topk_key(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
inline float topk_value(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline int32_t topk_padded(int32_t count) { return (count + kTopkStep - 1) & -kTopkStep; }

/// Pads the last step, for loops without a remainder.
inline void topk_pad(float* scores, int32_t count) {
  for (int32_t i = count; i < topk_padded(count); ++i) scores[i] = -__builtin_inff();
}

inline int32_t topk_count_greater(const float* scores, int32_t count, float pivot) {
  const Vector pivots = splat(pivot);
  Integers counts[4] = {};
  for (int32_t i = 0; i < count; i += kTopkStep) {
    for (int j = 0; j < 4; ++j)
      counts[j] = count_greater(counts[j], load(scores + i + j * kLanes), pivots);
  }
  return reduce_add(counts[0]) + reduce_add(counts[1]) + reduce_add(counts[2]) +
         reduce_add(counts[3]);
}

inline float topk_maximum(const float* scores, int32_t count) {
  Vector largest[4];
  for (Vector& x : largest) x = splat(-__builtin_inff());
  for (int32_t i = 0; i < count; i += kTopkStep) {
    for (int j = 0; j < 4; ++j) largest[j] = max(load(scores + i + j * kLanes), largest[j]);
  }
  return reduce_max(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

/// Takes any count of scores, without padding.
inline float topk_minimum(const float* scores, int32_t count) {
  Vector smallest[4];
  for (Vector& x : smallest) x = splat(__builtin_inff());
  int32_t i = 0;
  for (; i + kTopkStep <= count; i += kTopkStep) {
    for (int j = 0; j < 4; ++j) smallest[j] = min(load(scores + i + j * kLanes), smallest[j]);
  }
  float lanes[kLanes];
  store(lanes, min(min(smallest[0], smallest[1]), min(smallest[2], smallest[3])));
  float result = lanes[0];
  for (float x : lanes) result = x < result ? x : result;
  for (; i < count; ++i) result = scores[i] < result ? scores[i] : result;
  return result;
}

/// A description of the k largest of at least k scores: those greater than `value`, and the
/// first k - num_greater that equal it.
struct TopkCut {
  float value;
  int32_t num_greater;
  int64_t below;  // a key that at least k scores exceed
};

/// The search for a cut: at least k scores exceed key `below`, fewer exceed `above`.
struct TopkSearch {
  int64_t below, above;
  float excess, deficit;  // how far these counts exceed k and fall short of it
};

/// The next key to cut at: by interpolation (regula falsi, in its Illinois variant), which takes
/// about seven steps for smoothly spread scores; by bisection if it takes many.
inline int64_t topk_next_pivot(const TopkSearch& search, int step) {
  constexpr int kInterpolations = 12;
  const int64_t middle = search.below + (search.above - search.below) / 2;
  if (step >= kInterpolations || search.below == kTopkBottom) return middle;
  const float low = topk_value(static_cast<int32_t>(search.below));
  const float high = topk_value(static_cast<int32_t>(search.above));
  const float pivot = low + (high - low) * (search.excess / (search.excess + search.deficit));
  return pivot > low && pivot < high ? topk_key(pivot) : middle;
}

/// The cut of the first `count` scores, which topk_pad has padded; at least k of them
/// exceed `below`. Takes at most 44 counts for any scores.
inline TopkCut topk_cut(const float* scores, int32_t count, int32_t k, int64_t below) {
  const int32_t padded = topk_padded(count);
  const int64_t above = topk_key(topk_maximum(scores, padded));
  if (below == kTopkBottom) below = topk_key(topk_minimum(scores, count)) - int64_t{1};
  const auto surplus = static_cast<float>(count - k + 1);
  TopkSearch search = {below, above, surplus, static_cast<float>(k)};
  int32_t num_above = 0;
  int last_moved = 0;  // -1: below, 1: above
  for (int step = 0; search.above - search.below > 1; ++step) {
    const int64_t middle = topk_next_pivot(search, step);
    const float pivot = topk_value(static_cast<int32_t>(middle));
    const int32_t num_greater = topk_count_greater(scores, padded, pivot);
    if (num_greater == k) return {pivot, k, middle};
    // An end that stays for two steps counts half, so that it does not stay forever.
    if (num_greater > k) {
      search.below = middle;
      search.excess = static_cast<float>(num_greater - k);
      if (last_moved < 0) search.deficit /= 2;
      last_moved = -1;
    } else {
      search.above = middle;
      search.deficit = static_cast<float>(k - num_greater);
      if (last_moved > 0) search.excess /= 2;
      last_moved = 1;
      num_above = num_greater;
    }
  }
  return {topk_value(static_cast<int32_t>(search.above)), num_above, search.below};
}

/// The lowest `n` of the set bits.
inline uint32_t topk_lowest_bits(uint32_t bits, int32_t n) {
  uint32_t rest = bits;
  for (int32_t i = 0; i < n && rest != 0; ++i) rest &= rest - 1;
  return bits & ~rest;
}

/// Keeps the k best of the more than k entries, in place and in order.
inline void topk_shrink(TopkStream& stream) {
  topk_pad(stream.scores, stream.count);
  const int32_t count = topk_padded(stream.count);
  const TopkCut cut = topk_cut(stream.scores, stream.count, stream.k, stream.below);
  const Vector values = splat(cut.value);
  int32_t num_equal = stream.k - cut.num_greater;
  int32_t kept = 0;
  for (int32_t i = 0; i < count; i += kLanes) {
    const Vector scores = load(stream.scores + i);
    const Integers indices = load(stream.indices + i);
    uint32_t bits = greater(scores, values);
    if (num_equal > 0) {
      const uint32_t equal = greater_equal(scores, values) & ~bits;
      const uint32_t taken = topk_lowest_bits(equal, num_equal);
      num_equal -= __builtin_popcount(taken);
      bits |= taken;
    }
    store_compressed(stream.scores + kept, bits, scores);
    store_compressed(stream.indices + kept, bits, indices);
    kept += __builtin_popcount(bits);
  }
  stream.count = stream.k;
  stream.threshold = cut.value;
  stream.below = cut.below;
  stream.admits_all = false;
}

/// Takes scores without a threshold while there is room; returns their number.
inline int topk_push_all(TopkStream& stream, const float* scores, int n, int32_t first_index) {
  const int room = stream.capacity - stream.count;
  n = n < room ? n : room;
  float* out_scores = stream.scores + stream.count;
  int32_t* out_indices = stream.indices + stream.count;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out_scores + i, without_nan(load(scores + i)));
    store(out_indices + i, ascending(first_index + i));
  }
  for (; i < n; ++i) {
    out_scores[i] = scores[i] == scores[i] ? scores[i] : -__builtin_inff();
    out_indices[i] = first_index + i;
  }
  stream.count += n;
  if (stream.count == stream.capacity) topk_shrink(stream);
  return n;
}

/// Takes the scores out of kTopkStep that exceed the threshold.
inline void topk_push_step(TopkStream& stream, const float* scores, int32_t first_index) {
  const Vector threshold = splat(stream.threshold);
  uint32_t bits[4];
  for (int j = 0; j < 4; ++j) bits[j] = greater(load(scores + j * kLanes), threshold);
  if ((bits[0] | bits[1] | bits[2] | bits[3]) == 0) return;
  if (stream.count > stream.capacity - kTopkStep) topk_shrink(stream);
  for (int j = 0; j < 4; ++j) {
    store_compressed(stream.scores + stream.count, bits[j], load(scores + j * kLanes));
    store_compressed(stream.indices + stream.count, bits[j], ascending(first_index + j * kLanes));
    stream.count += __builtin_popcount(bits[j]);
  }
}

/// Takes scores [n] with indices first_index, first_index + 1, ..., all of them greater
/// than those of earlier calls. NaN counts as -inf.
inline void topk_push(TopkStream& stream, const float* scores, int n, int32_t first_index) {
  int i = 0;
  while (stream.admits_all && i < n) i += topk_push_all(stream, scores + i, n - i, first_index + i);
  for (; i + kTopkStep <= n; i += kTopkStep) topk_push_step(stream, scores + i, first_index + i);
  if (i < n) {
    float rest[kTopkStep];
    memcpy(rest, scores + i, static_cast<size_t>(n - i) * sizeof(float));
    topk_pad(rest, n - i);
    topk_push_step(stream, rest, first_index + i);
  }
}

/// One pass of a radix sort of entries [n], by the digit of the mask at `shift`.
inline void topk_sort_pass(
    const uint64_t* entries, uint64_t* sorted, int32_t n, int shift, uint32_t mask
) {
  constexpr int kMaxBuckets = 1 << 11;
  uint32_t begins[kMaxBuckets];
  memset(begins, 0, (mask + 1) * sizeof *begins);
  for (int32_t i = 0; i < n; ++i) ++begins[entries[i] >> shift & mask];
  uint32_t begin = 0;
  for (uint32_t digit = 0; digit <= mask; ++digit) {
    const uint32_t size = begins[digit];
    begins[digit] = begin;
    begin += size;
  }
  for (int32_t i = 0; i < n; ++i) sorted[begins[entries[i] >> shift & mask]++] = entries[i];
}

/// The indices by score, descending, keeping the order of ties: a radix sort by the bits in which
/// the keys differ, in digits of up to eleven.
inline void topk_sort(const TopkStream& stream, int32_t* out, uint64_t* scratch) {
  const int32_t n = stream.count;
  const float top = topk_maximum(stream.scores, topk_padded(n));
  uint64_t* entries = scratch;
  uint64_t* sorted = scratch + n;
  uint32_t span = 1;
  for (int32_t i = 0; i < n; ++i) {
    // The distance from the maximum. Adding 0 makes -0 the same as +0.
    const auto distance = static_cast<uint32_t>(topk_key(top + 0.0F)) -
                          static_cast<uint32_t>(topk_key(stream.scores[i] + 0.0F));
    entries[i] = uint64_t{distance} << 32 | static_cast<uint32_t>(stream.indices[i]);
    span |= distance;
  }
  const int num_bits = 32 - __builtin_clz(span);
  const int num_digits = (num_bits + 10) / 11;
  const int width = (num_bits + num_digits - 1) / num_digits;
  for (int digit = 0; digit < num_digits; ++digit) {
    topk_sort_pass(entries, sorted, n, 32 + digit * width, (1U << width) - 1);
    uint64_t* swap = entries;
    entries = sorted;
    sorted = swap;
  }
  for (int32_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>(entries[i]);
}

/// Ends a stream. out [k]: the indices of the k largest scores, ascending, or by descending score
/// if `sorted`; at most k scores are all listed, ascending, then -1. `scratch`: topk_sort_bytes(k),
/// if sorted.
inline void topk_finish(TopkStream& stream, bool sorted, int32_t* out, void* scratch) {
  if (stream.count > stream.k) topk_shrink(stream);
  if (sorted && !stream.admits_all) {
    topk_pad(stream.scores, stream.count);
    topk_sort(stream, out, static_cast<uint64_t*>(scratch));
  } else {
    memcpy(out, stream.indices, static_cast<size_t>(stream.count) * sizeof *out);
  }
  for (int32_t i = stream.count; i < stream.k; ++i) out[i] = -1;
}

}  // namespace
}  // namespace cpattn::kernels
