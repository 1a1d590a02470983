// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "cpattn/attention/attention_plan.h"
#include "meta/attention/attention_items.h"

namespace cpattn {
namespace {

/// Makes a mask with rows for all segments, in which no key is visible.
MaskBits hidden_rows(std::span<const AttentionSegment> segments) {
  MaskBits mask;
  int64_t bytes = 0;
  for (const AttentionSegment& segment : segments) {
    mask.offsets.push_back(bytes);
    mask.row_bytes.push_back((segment.kv_len + 31) / 32 * 4);
    bytes += segment.q_len * mask.row_bytes.back();
  }
  mask.bits.assign(bytes, 0);
  return mask;
}

/// Copies `count` bits, the first of which is bit first % 8 of from[first / 8], to the first ones
/// of `to`. Reads only bytes with some of these bits.
void copy_bits(const uint8_t* from, int64_t first, int64_t count, uint8_t* to) {
  if (count == 0) return;
  from += first / 8;
  const int shift = static_cast<int>(first % 8);
  const int64_t last = (count - 1) / 8;
  const int64_t last_from = (shift + count - 1) / 8;
  for (int64_t i = 0; i < last; ++i) {
    to[i] = static_cast<uint8_t>((from[i] >> shift) | (from[i + 1] << (8 - shift)));
  }
  const int above = last_from > last ? from[last + 1] << (8 - shift) : 0;
  to[last] =
      static_cast<uint8_t>(((from[last] >> shift) | above) & (0xff >> (7 - (count - 1) % 8)));
}

constexpr int64_t kWordKeys = 32;

/// Word `index` of a row, with only the bits of keys [begin, end).
uint32_t word_of(const uint8_t* row, int64_t index, int64_t begin, int64_t end) {
  uint32_t word = 0;
  std::memcpy(&word, row + index * 4, sizeof(word));
  const int64_t first = index * kWordKeys;
  if (begin > first) word &= ~uint32_t{0} << (begin - first);
  if (end < first + kWordKeys) word &= ~uint32_t{0} >> (first + kWordKeys - end);
  return word;
}

}  // namespace

ShownKeys shown_by_mask(
    const AttentionBatch& batch,
    const AttentionSegment& segment,
    int64_t first,
    int64_t count,
    int64_t kv_begin,
    int64_t kv_end
) {
  static_assert(std::endian::native == std::endian::little);  // bit j of a row is bit j of words
  const auto index = &segment - batch.segments.data();
  const uint8_t* rows = batch.mask.bits.data() + batch.mask.offsets[index];
  const int64_t first_word = kv_begin / kWordKeys;
  std::vector<uint32_t> seen((kv_end + kWordKeys - 1) / kWordKeys - first_word);
  ShownKeys shown;
  for (int64_t token = first; token < first + count; ++token) {
    const VisibleKeys keys = visible_keys(batch, segment, token);
    const int64_t begin = std::max(kv_begin, keys.begin), end = std::min(kv_end, keys.end);
    for (int64_t word = begin / kWordKeys; word * kWordKeys < end; ++word) {
      const uint32_t bits = word_of(rows + token * batch.mask.row_bytes[index], word, begin, end);
      shown.pairs += std::popcount(bits);
      seen[word - first_word] |= bits;
    }
  }
  for (const uint32_t bits : seen) shown.keys += bits == 0 ? 0 : kWordKeys;
  return shown;
}

MaskBits pack_mask(
    std::span<const AttentionSegment> segments,
    const uint8_t* values,
    std::span<const int64_t> starts,
    std::span<const int64_t> row_strides,
    bool inverted
) {
  MaskBits mask = hidden_rows(segments);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    for (int64_t row = 0; row < segments[s].q_len; ++row) {
      const uint8_t* from = values + starts[s] + row * row_strides[s];
      uint8_t* to = mask.bits.data() + mask.offsets[s] + row * mask.row_bytes[s];
      for (int64_t key = 0; key < segments[s].kv_len; ++key) {
        to[key / 8] |= static_cast<uint8_t>(((from[key] != 0) != inverted) << key % 8);
      }
    }
  }
  return mask;
}

MaskBits repack_mask(
    std::span<const AttentionSegment> segments,
    const uint8_t* bits,
    std::span<const int64_t> starts,
    std::span<const int64_t> row_strides
) {
  MaskBits mask = hidden_rows(segments);
  for (std::size_t s = 0; s < segments.size(); ++s) {
    for (int64_t row = 0; row < segments[s].q_len; ++row) {
      copy_bits(
          bits, starts[s] + row * row_strides[s], segments[s].kv_len,
          mask.bits.data() + mask.offsets[s] + row * mask.row_bytes[s]
      );
    }
  }
  return mask;
}

}  // namespace cpattn
