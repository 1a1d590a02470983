// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/attention_plan.h"

namespace cpattn {
namespace {

/// Makes room for the rows of all segments, in which nothing is visible yet.
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
/// of `to`. Reads no byte that holds none of them.
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

}  // namespace

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
