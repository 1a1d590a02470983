// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/fia_mask.h"

#include <algorithm>
#include <vector>

namespace cpattn::fia {
namespace {

/// The side of the triangular template that modes 2 to 4 require but never read.
constexpr int64_t kTemplateSize = 2048;

enum SparseMode { kDefaultMask, kAllMask, kLeftUpCausal, kRightDownCausal, kBand };

/// Producers may round a side up to whole vectors of 16 or 32.
bool is_rounded(int64_t side, int64_t needed) {
  return side == needed || side == (needed + 15) / 16 * 16 || side == (needed + 31) / 32 * 32;
}

}  // namespace

Band read_band(const FiaArguments& arguments) {
  switch (arguments.sparse_mode) {
    case kLeftUpCausal:
      return {.right = 0};
    case kRightDownCausal:
      return {.right = 0, .right_down = true};
    case kAllMask:
      return {};
    default:
      if (!arguments.atten_mask) return {};
  }
  const int64_t before = std::clamp(arguments.pre_tokens, -kUnboundedKeys, kUnboundedKeys);
  const int64_t after = std::clamp(arguments.next_tokens, -kUnboundedKeys, kUnboundedKeys);
  require(
      before + after >= 0,
      "pre_tokens + next_tokens must be >= 0 for a band that holds any key, got ",
      arguments.pre_tokens, " and ", arguments.next_tokens
  );
  const int64_t shift = std::max<int64_t>(-before, 0) - std::max<int64_t>(-after, 0);
  return {
      .left = before + shift,
      .right = after - shift,
      .shift = shift,
      .right_down = arguments.sparse_mode == kBand,
  };
}

bool check_mask(const FiaArguments& arguments, const Layout& layout) {
  const int64_t mode = arguments.sparse_mode;
  const bool given = arguments.atten_mask.has_value();
  require(mode >= kDefaultMask && mode <= kBand, "sparse_mode must be in [0, 4], got ", mode);
  require(given || mode == kDefaultMask, "sparse_mode ", mode, " needs atten_mask");
  require(
      !layout.packed() || mode == (given ? kRightDownCausal : kDefaultMask), arguments.input_layout,
      " takes sparse_mode 0 without atten_mask or 3 with it, got ", mode,
      given ? " with it" : " without"
  );
  if (!given) return false;
  const TensorView& mask = *arguments.atten_mask;
  require(
      mask.dtype == DType::bool8 || mask.dtype == DType::int8 || mask.dtype == DType::uint8,
      "atten_mask must be bool, int8 or uint8, got ", mask.dtype
  );
  require(
      mask.rank >= 2 && mask.rank <= 4 && mask.last_dim_contiguous(),
      "atten_mask must have 2 to 4 dimensions, the last one contiguous, got shape ", ShapeOf{mask}
  );
  if (mode == kDefaultMask || mode == kAllMask) return true;
  bool square =
      mask.shape[mask.rank - 2] == kTemplateSize && mask.shape[mask.rank - 1] == kTemplateSize;
  for (int axis = 0; axis < mask.rank - 2; ++axis) square = square && mask.shape[axis] == 1;
  require(
      square, "atten_mask must be the [2048, 2048] template for sparse_mode ", mode,
      " ([1, 2048, 2048] and [1, 1, 2048, 2048] too), got shape ", ShapeOf{mask}
  );
  return false;
}

ReadMask::ReadMask(const FiaArguments& arguments, const Sequences& sequences, int64_t max_q_len)
    : mask_(*arguments.atten_mask) {
  const bool paged = arguments.block_table.has_value();
  const int64_t batch = sequences.size(), max_kv_len = sequences.max_kv_len;
  const int64_t rows = mask_.shape[mask_.rank - 2], columns = mask_.shape[mask_.rank - 1];
  // For a prompt of one token engines pass the template, whose first element is the only pair.
  const bool one_pair = max_q_len == 1 && max_kv_len == 1 && rows > 0 && columns > 0;
  const bool columns_fit =
      one_pair || (paged ? columns >= max_kv_len : is_rounded(columns, max_kv_len));
  const bool row_per_sequence = mask_.rank == 2 && max_q_len == 1 && rows == batch;
  const bool rows_fit = row_per_sequence || one_pair || is_rounded(rows, max_q_len);
  const bool heads_fit = mask_.rank < 4 || mask_.shape[1] == 1;
  const bool batch_fits = mask_.rank < 3 || mask_.shape[0] == 1 || mask_.shape[0] == batch;
  require(
      columns_fit && rows_fit && heads_fit && batch_fits,
      "atten_mask must be [S1, S2], [B or 1, S1, S2] or [B or 1, 1, S1, S2] with B = ", batch,
      ", S1 = ", max_q_len, ", S2 = ", max_kv_len, paged ? " or more" : "", ", got shape ",
      ShapeOf{mask_}
  );
  const bool one_per_sequence = mask_.rank == 2 ? row_per_sequence : mask_.shape[0] > 1;
  sequence_stride_ = one_per_sequence ? mask_.strides[0] : 0;
}

MaskBits ReadMask::pack(std::span<const AttentionSegment> segments, int64_t first) const {
  std::vector<int64_t> starts(segments.size());
  for (std::size_t s = 0; s < segments.size(); ++s) {
    starts[s] = (first + static_cast<int64_t>(s)) * sequence_stride_;
  }
  const std::vector<int64_t> row_strides(segments.size(), mask_.strides[mask_.rank - 2]);
  return pack_mask(segments, mask_.as<const uint8_t>(), starts, row_strides, /*inverted=*/true);
}

}  // namespace cpattn::fia
