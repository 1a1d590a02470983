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

/// Checks that rows and keys have positions; returns the lengths that a batch reads of its
/// sequences.
std::vector<SequenceLens> placed_lens(
    const char* function, const BiasPositions& positions, const AttentionBatch& batch
) {
  for (const auto& [name, tensor] :
       {std::pair{"token_positions", &positions.tokens}, {"key_positions", &positions.keys}}) {
    check_dtype(function, name, tensor->dtype, DType::int32);
    check_rows(function, name, *tensor, {tensor->shape[0]});
  }
  const int64_t num_parts = std::ssize(batch.pages.indptr) - 1;
  check(
      std::ssize(positions.first_key) == num_parts && std::ssize(positions.sequences) == num_parts,
      function, ": first_key and sequences must have ", num_parts, " entries, got ",
      positions.first_key.size(), " and ", positions.sequences.size()
  );
  std::vector<SequenceLens> lens(positions.first_positions.size());
  for (const AttentionSegment& segment : batch.segments) {
    if (segment.q_len == 0 || segment.kv_len == 0) continue;
    const int64_t first_key = positions.first_key[segment.table_row];
    const int64_t sequence = positions.sequences[segment.table_row];
    check(
        segment.q_begin + segment.q_len <= positions.tokens.shape[0] && first_key >= 0 &&
            first_key + segment.kv_len <= positions.keys.shape[0] && sequence >= 0 &&
            sequence < std::ssize(lens),
        function, ": positions must be those of all rows and keys, got ", positions.tokens.shape[0],
        " and ", positions.keys.shape[0], " in ", lens.size(), " sequences"
    );
    const int32_t* tokens = positions.tokens.as<int32_t>() + segment.q_begin;
    const auto [least, most] = std::minmax_element(tokens, tokens + segment.q_len);
    const int64_t first_position = positions.first_positions[sequence];
    check(
        *least >= first_position, function, ": token_positions must be from ", first_position,
        " on in sequence ", sequence, ", got ", *least
    );
    const int64_t last_key = positions.keys.as<int32_t>()[first_key + segment.kv_len - 1];
    lens[sequence].q_len = std::max(lens[sequence].q_len, *most - first_position + 1);
    lens[sequence].kv_len = std::max(lens[sequence].kv_len, last_key + 1);
  }
  return lens;
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
  if (!bias.relative_bias) return;
  const TensorView& table = *bias.relative_bias;
  check_dtype(function, "relative_bias", table.dtype, DType::float32);
  check_tensor(function, "relative_bias", table, 2);
  check(
      table.shape[0] == num_heads && table.shape[1] % 2 == 1, function, ": relative_bias must be [",
      num_heads, ", 2 * max_distance + 1], got shape ", ShapeOf{table}
  );
}

void check_bias(const char* function, const ScoreBias& bias, const AttentionBatch& batch) {
  if (bias.numbers.empty() && !bias.of_each_sequence && !bias.alibi_slopes && !bias.relative_bias) {
    return;
  }
  if (bias.positions) {
    const int64_t num_heads = batch.shape.num_heads;
    check_bias(function, bias, num_heads, placed_lens(function, *bias.positions, batch));
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
}

kernels::TileBias tile_bias(
    const ScoreBias& bias, const AttentionBatch& batch, const AttentionItem& item
) {
  kernels::TileBias tile;
  const AttentionSegment& segment = batch.segments[item.segment];
  int64_t sequence = segment.table_row;
  int64_t first_token = segment.first_token + item.first_token * segment.position_step;
  int64_t token_step = segment.position_step;
  if (bias.positions) {
    const BiasPositions& positions = *bias.positions;
    tile.token_positions = positions.tokens.as<int32_t>() + segment.q_begin + item.first_token;
    tile.key_positions = positions.keys.as<int32_t>() + positions.first_key[sequence];
    sequence = positions.sequences[sequence];
    tile.first_position = positions.first_positions[sequence];
    first_token = 0;
    token_step = 1;
  }
  if (!bias.numbers.empty()) {
    const TensorView& tensor = bias.numbers[bias.of_each_sequence ? sequence : 0];
    const int heads = tensor.rank - 3;
    tile.type = element_type("", "", tensor.dtype);
    tile.head_stride = broadcast_stride(tensor, heads);
    const int64_t token_stride = broadcast_stride(tensor, heads + 1);
    tile.token_stride = token_stride * token_step;
    tile.key_stride = broadcast_stride(tensor, heads + 2);
    int64_t offset = item.first_head * tile.head_stride + first_token * token_stride;
    if (heads > 0) offset += sequence * broadcast_stride(tensor, 0);
    tile.numbers = static_cast<const char*>(tensor.data) + offset * element_size(tensor.dtype);
  }
  if (bias.alibi_slopes) {
    const TensorView& slopes = *bias.alibi_slopes;
    const int64_t of_sequence = slopes.rank == 2 ? sequence * slopes.strides[0] : 0;
    tile.alibi_slopes = slopes.as<float>() + of_sequence + item.first_head;
  }
  if (bias.relative_bias) {
    const TensorView& table = *bias.relative_bias;
    tile.max_distance = table.shape[1] / 2;
    tile.relative_bias_head_stride = table.strides[0];
    tile.relative_bias = table.as<float>() + item.first_head * table.strides[0] + tile.max_distance;
  }
  return tile;
}

}  // namespace cpattn
