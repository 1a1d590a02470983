// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/tile_bias.h"

#include <algorithm>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// The sizes that biases must have.
struct Sizes {
  int64_t queries = 0, keys = 0;
};

/// New tokens and keys of a segment's sequence, as far as the segment needs them.
Sizes sizes_of(const AttentionSegment& segment) {
  if (segment.q_len == 0) return {};
  return {segment.first_token + (segment.q_len - 1) * segment.position_step + 1, segment.kv_len};
}

int64_t num_sequences(const AttentionBatch& batch) { return std::ssize(batch.pages.indptr) - 1; }

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
    const AttentionBatch& batch,
    const Sizes& sizes
) {
  element_type(function, name.c_str(), tensor.dtype);
  const int heads = tensor.rank - 3;
  check_axis(function, name, tensor, heads, batch.shape.num_heads, "num_heads");
  const auto check_length = [&](int axis, int64_t size, const char* of) {
    check(
        tensor.shape[axis] == 1 || tensor.shape[axis] >= size, function, ": ", name,
        " must have at least ", size, " (", of, ") or 1 in dimension ", axis, ", got shape ",
        ShapeOf{tensor}
    );
  };
  check_length(heads + 1, sizes.queries, "new tokens");
  check_length(heads + 2, sizes.keys, "keys");
}

/// The sizes that the numbers of each sequence must have.
std::vector<Sizes> sizes_of_sequences(const AttentionBatch& batch) {
  std::vector<Sizes> sizes(num_sequences(batch));
  for (const AttentionSegment& segment : batch.segments) {
    const Sizes needed = sizes_of(segment);
    Sizes& of_sequence = sizes[segment.table_row];
    of_sequence.queries = std::max(of_sequence.queries, needed.queries);
    of_sequence.keys = std::max(of_sequence.keys, needed.keys);
  }
  return sizes;
}

void check_padded_numbers(
    const char* function, const TensorView& tensor, const AttentionBatch& batch
) {
  check(
      tensor.rank == 4, function, ": bias must be [batch, num_heads, queries, keys], got shape ",
      ShapeOf{tensor}
  );
  check_axis(function, "bias", tensor, 0, num_sequences(batch), "sequences");
  Sizes longest;
  for (const Sizes& sizes : sizes_of_sequences(batch)) {
    longest.queries = std::max(longest.queries, sizes.queries);
    longest.keys = std::max(longest.keys, sizes.keys);
  }
  check_numbers(function, "bias", tensor, batch, longest);
}

void check_numbers_of_each(
    const char* function, const std::vector<TensorView>& tensors, const AttentionBatch& batch
) {
  check(
      std::ssize(tensors) == num_sequences(batch), function,
      ": bias must be a tensor or a list of ", num_sequences(batch),
      " tensors, one for each sequence, got ", tensors.size()
  );
  const std::vector<Sizes> sizes = sizes_of_sequences(batch);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = concat("bias[", i, "]");
    check(
        tensors[i].rank == 3, function, ": ", name,
        " must be [num_heads, queries, keys], got shape ", ShapeOf{tensors[i]}
    );
    check_numbers(function, name, tensors[i], batch, sizes[i]);
  }
}

/// The stride of an axis; 0 for one of length 1.
int64_t broadcast_stride(const TensorView& tensor, int axis) {
  return tensor.shape[axis] == 1 ? 0 : tensor.strides[axis];
}

}  // namespace

void check_bias(const char* function, const ScoreBias& bias, const AttentionBatch& batch) {
  if (bias.of_each_sequence) {
    check_numbers_of_each(function, bias.numbers, batch);
  } else if (!bias.numbers.empty()) {
    check_padded_numbers(function, bias.numbers[0], batch);
  }
  const int64_t num_heads = batch.shape.num_heads;
  if (bias.alibi_slopes) {
    const TensorView& slopes = *bias.alibi_slopes;
    check_dtype(function, "alibi_slopes", slopes.dtype, DType::float32);
    if (slopes.rank == 2) {
      check_rows(function, "alibi_slopes", slopes, {num_sequences(batch), num_heads});
    } else {
      check_rows(function, "alibi_slopes", slopes, {num_heads});
    }
  }
  if (bias.relative) {
    const TensorView& table = *bias.relative;
    check_dtype(function, "relative_bias", table.dtype, DType::float32);
    check_tensor(function, "relative_bias", table, 2);
    check(
        table.shape[0] == num_heads && table.shape[1] % 2 == 1, function,
        ": relative_bias must be [", num_heads, ", 2 * max_distance + 1], got shape ",
        ShapeOf{table}
    );
  }
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
  return tile;
}

}  // namespace cpattn
