// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/tile_bias.h"

#include <algorithm>
#include <cmath>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// Checks an axis that may have length 1 instead.
void check_axis(
    const char* function,
    const std::string& name,
    const TensorView& tensor,
    int axis,
    int64_t size,
    const char* of
) {
  check(
      tensor.shape[axis] == 1 || tensor.shape[axis] == size, function, ": ", name, " must have ",
      size, " (", of, ") or 1 in dimension ", axis, ", got shape ", ShapeOf{tensor}
  );
}

/// Checks the last three axes of numbers: heads, queries and keys.
void check_numbers(
    const char* function,
    const std::string& name,
    const TensorView& tensor,
    int64_t num_heads,
    const SequenceLens& lens
) {
  element_type(function, name.c_str(), tensor.dtype);
  const int heads = tensor.rank - 3;
  check_axis(function, name, tensor, heads, num_heads, "num_heads");
  const auto check_length = [&](int axis, int64_t size, const char* of) {
    check(
        tensor.shape[axis] == 1 || tensor.shape[axis] >= size, function, ": ", name,
        " must have at least ", size, " (", of, ") or 1 in dimension ", axis, ", got shape ",
        ShapeOf{tensor}
    );
  };
  check_length(heads + 1, lens.q_len, "new tokens");
  check_length(heads + 2, lens.q_len == 0 ? 0 : lens.kv_len, "keys");
}

void check_padded_numbers(
    const char* function,
    const TensorView& tensor,
    int64_t num_heads,
    std::span<const SequenceLens> sequences
) {
  check(
      tensor.rank == 4, function, ": bias must be [batch, num_heads, queries, keys], got shape ",
      ShapeOf{tensor}
  );
  check_axis(function, "bias", tensor, 0, std::ssize(sequences), "sequences");
  SequenceLens longest{};
  for (const SequenceLens& lens : sequences) {
    if (lens.q_len == 0) continue;
    longest.q_len = std::max(longest.q_len, lens.q_len);
    longest.kv_len = std::max(longest.kv_len, lens.kv_len);
  }
  check_numbers(function, "bias", tensor, num_heads, longest);
}

void check_numbers_of_each(
    const char* function,
    const std::vector<TensorView>& tensors,
    int64_t num_heads,
    std::span<const SequenceLens> sequences
) {
  check(
      tensors.size() == sequences.size(), function, ": bias must be a tensor or a list of ",
      sequences.size(), " tensors, one for each sequence, got ", tensors.size()
  );
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = concat("bias[", i, "]");
    check(
        tensors[i].rank == 3, function, ": ", name,
        " must be [num_heads, queries, keys], got shape ", ShapeOf{tensors[i]}
    );
    check_numbers(function, name, tensors[i], num_heads, sequences[i]);
  }
}

void check_slopes(
    const char* function, const TensorView& slopes, int64_t num_heads, int64_t num_sequences
) {
  check_dtype(function, "alibi_slopes", slopes.dtype, DType::float32);
  const bool of_each = slopes.rank == 2;
  if (of_each) {
    check_rows(function, "alibi_slopes", slopes, {num_sequences, num_heads});
  } else {
    check_rows(function, "alibi_slopes", slopes, {num_heads});
  }
  for (int64_t row = 0; row < (of_each ? num_sequences : 1); ++row) {
    const float* numbers = slopes.as<float>() + (of_each ? row * slopes.strides[0] : 0);
    for (int64_t head = 0; head < num_heads; ++head) {
      check(
          std::isfinite(numbers[head]), function, ": alibi_slopes must be finite, got ",
          numbers[head], " of head ", head
      );
    }
  }
}

/// Checks that rows and keys of a batch have positions.
void check_positions(const char* function, const ScoreBias& bias, const AttentionBatch& batch) {
  const auto check_list = [&](const char* name, const TensorView& positions) {
    check_dtype(function, name, positions.dtype, DType::int32);
    check_rows(function, name, positions, {positions.shape[0]});
  };
  check_list("token_positions", *bias.token_positions);
  check_list("key_positions", *bias.key_positions);
  for (const AttentionSegment& segment : batch.segments) {
    if (segment.q_len == 0) continue;
    check(
        segment.q_begin + segment.q_len <= bias.token_positions->shape[0], function,
        ": token_positions must have one for each row of q, got ", bias.token_positions->shape[0]
    );
    check(
        segment.table_row < std::ssize(bias.first_key) && bias.first_key[segment.table_row] >= 0 &&
            bias.first_key[segment.table_row] + segment.kv_len <= bias.key_positions->shape[0],
        function, ": key_positions must have those of sequence ", segment.table_row, ", got ",
        bias.key_positions->shape[0]
    );
  }
}

/// The stride of an axis; 0 for one of length 1.
int64_t broadcast_stride(const TensorView& tensor, int axis) {
  return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis];
}

}  // namespace

void check_bias(
    const char* function,
    const ScoreBias& bias,
    int64_t num_heads,
    std::span<const SequenceLens> sequences
) {
  if (bias.of_each_sequence) {
    check_numbers_of_each(function, bias.numbers, num_heads, sequences);
  } else if (!bias.numbers.empty()) {
    check_padded_numbers(function, bias.numbers[0], num_heads, sequences);
  }
  if (bias.alibi_slopes) {
    check_slopes(function, *bias.alibi_slopes, num_heads, std::ssize(sequences));
  }
  if (!bias.relative) return;
  const TensorView& table = *bias.relative;
  check_dtype(function, "relative_bias", table.dtype, DType::float32);
  check_tensor(function, "relative_bias", table, 2);
  check(
      table.shape[0] == num_heads && table.shape[1] % 2 == 1, function, ": relative_bias must be [",
      num_heads, ", 2 * max_distance + 1], got shape ", ShapeOf{table}
  );
}

void check_bias(const char* function, const ScoreBias& bias, const AttentionBatch& batch) {
  if (bias.numbers.empty() && !bias.of_each_sequence && !bias.alibi_slopes && !bias.relative) {
    return;
  }
  std::vector<SequenceLens> read(batch.pages.indptr.size() - 1);
  for (const AttentionSegment& segment : batch.segments) {
    if (segment.q_len == 0) continue;
    SequenceLens& lens = read[segment.table_row];
    const int64_t last = segment.first_token + (segment.q_len - 1) * segment.position_step;
    lens.q_len = std::max(lens.q_len, last + 1);
    lens.kv_len = std::max(lens.kv_len, segment.kv_len);
  }
  check_bias(function, bias, batch.shape.num_heads, read);
  if (bias.key_positions) check_positions(function, bias, batch);
}

kernels::TileBias tile_bias(
    const ScoreBias& bias, const AttentionBatch& batch, const AttentionItem& item
) {
  kernels::TileBias tile;
  const AttentionSegment& segment = batch.segments[item.segment];
  if (!bias.numbers.empty()) {
    const TensorView& tensor = bias.numbers[bias.of_each_sequence ? segment.table_row : 0];
    const int heads = tensor.rank - 3;
    tile.type = element_type("", "", tensor.dtype);
    tile.head_stride = broadcast_stride(tensor, heads);
    const int64_t token_stride = broadcast_stride(tensor, heads + 1);
    tile.token_stride = token_stride * segment.position_step;
    tile.key_stride = broadcast_stride(tensor, heads + 2);
    int64_t offset = item.first_head * tile.head_stride + segment.first_token * token_stride +
                     item.first_token * tile.token_stride;
    if (heads > 0) offset += segment.table_row * broadcast_stride(tensor, 0);
    tile.numbers = static_cast<const char*>(tensor.data) + offset * element_size(tensor.dtype);
  }
  if (bias.alibi_slopes) {
    const TensorView& slopes = *bias.alibi_slopes;
    const int64_t of_sequence = slopes.rank == 2 ? segment.table_row * slopes.strides[0] : 0;
    tile.slopes = slopes.as<float>() + of_sequence + item.first_head;
  }
  if (bias.relative) {
    const TensorView& table = *bias.relative;
    tile.max_distance = table.shape[1] / 2;
    tile.by_distance_head_stride = table.strides[0];
    tile.by_distance = table.as<float>() + item.first_head * table.strides[0] + tile.max_distance;
  }
  if (bias.key_positions) {
    tile.token_positions = bias.token_positions->as<int32_t>() + segment.q_begin + item.first_token;
    tile.key_positions = bias.key_positions->as<int32_t>() + bias.first_key[segment.table_row];
  }
  return tile;
}

}  // namespace cpattn
