// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/key_visibility.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// The place of each sequence's first value in a mask; each is a multiple of the granule.
struct MaskLayout {
  std::vector<int64_t> starts;
  int64_t size = 0;        // in granules
  bool counts_all = true;  // false: counting stopped as soon as the size passed the given one
};

MaskLayout layout_of(std::span<const SequenceLens> sequences, int64_t granule, int64_t given) {
  MaskLayout layout;
  for (const SequenceLens& lens : sequences) {
    layout.counts_all = layout.size <= given;
    if (!layout.counts_all) break;  // before the sum could overflow
    layout.starts.push_back(layout.size * granule);
    layout.size += (lens.q_len * lens.kv_len + granule - 1) / granule;
  }
  return layout;
}

/// The first value of each segment in a mask, and the distance between its rows.
struct MaskRows {
  std::vector<int64_t> starts, strides;
};

MaskRows rows_of(
    std::span<const AttentionSegment> segments,
    std::span<const SequenceLens> sequences,
    const MaskLayout& layout
) {
  MaskRows rows;
  for (const AttentionSegment& segment : segments) {
    const int64_t kv_len = sequences[segment.table_row].kv_len;
    rows.starts.push_back(layout.starts[segment.table_row] + segment.first_token * kv_len);
    rows.strides.push_back(segment.position_step * kv_len);
  }
  return rows;
}

MaskBits pack(
    const char* function,
    const TensorView& mask,
    std::span<const SequenceLens> sequences,
    std::span<const AttentionSegment> segments
) {
  check(mask.dtype == DType::bool8, function, ": custom_mask must be bool, got ", mask.dtype);
  check(mask.is_contiguous(), function, ": custom_mask must be contiguous");
  const int64_t given = mask.num_elements();
  const MaskLayout layout = layout_of(sequences, 1, given);
  check(
      layout.size == given, function, ": custom_mask must have sum(q_len * kv_len) = ", layout.size,
      layout.counts_all ? "" : " or more", " elements, got ", given
  );
  const MaskRows rows = rows_of(segments, sequences, layout);
  return pack_mask(segments, mask.as<uint8_t>(), rows.starts, rows.strides, /*inverted=*/false);
}

MaskBits repack(
    const char* function,
    const TensorView& mask,
    std::span<const SequenceLens> sequences,
    std::span<const AttentionSegment> segments
) {
  check(
      mask.dtype == DType::uint8, function, ": packed_custom_mask must be uint8, got ", mask.dtype
  );
  check(mask.is_contiguous(), function, ": packed_custom_mask must be contiguous");
  const int64_t given = mask.num_elements();
  const MaskLayout layout = layout_of(sequences, 8, given);
  check(
      layout.size == given, function,
      ": packed_custom_mask must have sum(ceil(q_len * kv_len / 8)) = ", layout.size,
      layout.counts_all ? "" : " or more", " bytes, got ", given
  );
  const MaskRows rows = rows_of(segments, sequences, layout);
  return repack_mask(segments, mask.as<uint8_t>(), rows.starts, rows.strides);
}

}  // namespace

void set_visibility(
    const char* function,
    const KeyVisibility& visibility,
    std::span<const SequenceLens> sequences,
    AttentionBatch& batch
) {
  const auto& custom_mask = visibility.custom_mask;
  const auto& packed_custom_mask = visibility.packed_custom_mask;
  check_key_window(function, visibility.window);
  check(
      !custom_mask || !packed_custom_mask, function,
      ": give either custom_mask or packed_custom_mask, got both"
  );
  const auto [left, right] = visibility.window.value_or(KeyWindow{});
  for (AttentionSegment& segment : batch.segments) {
    segment.left = std::min(left.value_or(kUnboundedKeys), kUnboundedKeys);
    segment.right = visibility.is_causal(segment.table_row)
                        ? 0
                        : std::min(right.value_or(kUnboundedKeys), kUnboundedKeys);
  }
  if (visibility.key_ranges) set_key_ranges(function, *visibility.key_ranges, batch);
  if (custom_mask) batch.mask = pack(function, *custom_mask, sequences, batch.segments);
  if (packed_custom_mask) {
    batch.mask = repack(function, *packed_custom_mask, sequences, batch.segments);
  }
}

}  // namespace cpattn
