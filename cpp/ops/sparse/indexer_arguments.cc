// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse/indexer_arguments.h"

#include <algorithm>

#include "cpattn/base/check.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

constexpr int64_t kMaxHeads = 1024;

bool is_key_dtype(DType dtype) {
  return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float8_e4m3fn ||
         dtype == DType::int8;
}

void check_weights(const IndexerArguments& arguments) {
  const TensorView& weights = arguments.weights;
  const TensorView& q = arguments.q;
  check(
      weights.dtype == DType::float32 || weights.dtype == DType::bfloat16, arguments.function,
      ": weights must be float32 or bfloat16, got ", weights.dtype
  );
  const bool one = weights.rank == 3 && weights.shape[2] == 1;
  check(
      (weights.rank == 2 || one) && weights.shape[0] == q.shape[0] &&
          weights.shape[1] == q.shape[1],
      arguments.function, ": weights must have shape [", q.shape[0], ", ", q.shape[1],
      "] or that and 1, got ", ShapeOf{weights}
  );
}

void check_rows_of(const IndexerArguments& arguments) {
  const char* function = arguments.function;
  const TensorView& q = arguments.q;
  for (const IndexerRow& row : arguments.rows) {
    check(
        row.query >= 0 && row.query < q.shape[0], function, ": q has ", q.shape[0],
        " rows, none is ", row.query
    );
    if (row.begin >= row.end) continue;
    check(
        row.table_row >= 0 && row.table_row < arguments.pages.num_rows(), function,
        ": the page table has ", arguments.pages.num_rows(), " rows, none is ", row.table_row
    );
    const auto* indptr = arguments.pages.indptr.data() + row.table_row;
    check(
        row.begin >= 0 && row.end <= (indptr[1] - indptr[0]) * arguments.keys.page_size, function,
        ": keys [", row.begin, ", ", row.end, ") of query ", row.query, " are not in the ",
        indptr[1] - indptr[0], " pages of row ", row.table_row
    );
  }
}

}  // namespace

void check_indexer_arguments(const IndexerArguments& arguments) {
  const char* function = arguments.function;
  const TensorView& q = arguments.q;
  const IndexKeys& keys = arguments.keys;
  check(
      is_key_dtype(keys.dtype), function,
      ": keys must be bfloat16, float32, float8_e4m3fn or int8, got ", keys.dtype
  );
  const char* q_name = arguments.q_name;
  check_tensor(function, q_name, q, 3);
  check(
      q.dtype == keys.dtype, function, ": ", q_name, " must be ", keys.dtype, " as the keys, got ",
      q.dtype
  );
  check(
      q.shape[1] >= 1 && q.shape[1] <= kMaxHeads, function, ": ", q_name, " must have 1 to ",
      kMaxHeads, " heads, got ", q.shape[1]
  );
  check(
      q.shape[2] == keys.dim, function, ": ", q_name, " must have the dimension of the keys (",
      keys.dim, "), got ", q.shape[2]
  );
  const int64_t multiple = keys.dtype == DType::float8_e4m3fn ? 32 : 16;
  check(
      keys.dim >= multiple && keys.dim % multiple == 0 && keys.dim <= kernels::kMaxIndexerDim,
      function, ": the dimension of ", keys.dtype, " keys must be a multiple of ", multiple,
      " up to ", kernels::kMaxIndexerDim, ", got ", keys.dim
  );
  check_weights(arguments);
  check_rows_of(arguments);
}

void check_indexer_result(
    const IndexerArguments& arguments,
    const char* name,
    const TensorView& result,
    DType dtype,
    int64_t columns
) {
  const char* function = arguments.function;
  check_dtype(function, name, result.dtype, dtype);
  check_rows(function, name, result, {arguments.q.shape[0], columns});
  check_no_overlap(function, name, result, arguments.q_name, arguments.q);
  check_no_overlap(function, name, result, "weights", arguments.weights);
  const IndexKeys& keys = arguments.keys;
  const auto rows = [&](const void* data, int64_t page_bytes, int64_t row_bytes, int64_t bytes) {
    return TensorView{
        .data = const_cast<void*>(data),
        .dtype = DType::uint8,
        .rank = 3,
        .shape = {keys.num_pages, keys.page_size, bytes},
        .strides = {page_bytes, row_bytes, 1},
    };
  };
  const int64_t key_bytes = keys.dim * element_size(keys.dtype);
  const TensorView key_rows = rows(keys.data, keys.page_bytes, keys.row_bytes, key_bytes);
  check_no_overlap(function, name, result, "the keys", key_rows);
  if (keys.scales == nullptr) return;
  const TensorView scales =
      rows(keys.scales, keys.scale_page_bytes, keys.scale_row_bytes, sizeof(float));
  check_no_overlap(function, name, result, "the scales of the keys", scales);
}

kernels::IndexerType indexer_type(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return kernels::kIndexFloat32;
    case DType::bfloat16:
      return kernels::kIndexBfloat16;
    case DType::float8_e4m3fn:
      return kernels::kIndexFloat8;
    default:
      return kernels::kIndexInt8;
  }
}

IndexKeys flat_index_keys(
    const char* function, const TensorView& k, const std::optional<TensorView>& scales
) {
  check_tensor(function, "k", k, 2);
  const int64_t bytes = element_size(k.dtype);
  IndexKeys keys{
      .data = k.data,
      .dtype = k.dtype,
      .dim = k.shape[1],
      .num_pages = k.shape[0] > 0 ? 1 : 0,
      .page_size = std::max<int64_t>(1, k.shape[0]),
      .row_bytes = k.strides[0] * bytes,
  };
  if (!scales) return keys;
  check(
      scales->dtype == DType::float32, function, ": k_scale must be float32, got ", scales->dtype
  );
  const bool one = scales->rank == 2 && scales->shape[1] == 1;
  check(
      (scales->rank == 1 || one) && scales->shape[0] == k.shape[0], function,
      ": k_scale must have shape [", k.shape[0], "] or [", k.shape[0], ", 1], got ",
      ShapeOf{*scales}
  );
  keys.scales = scales->data;
  keys.scale_row_bytes = scales->strides[0] * element_size(scales->dtype);
  return keys;
}

std::vector<IndexerRow> flat_indexer_rows(
    const char* function,
    std::span<const int64_t> ks,
    std::span<const int64_t> ke,
    int64_t num_queries,
    int64_t num_keys
) {
  check(
      std::ssize(ks) == num_queries && std::ssize(ke) == num_queries, function,
      ": ks and ke must have one entry for each of ", num_queries, " queries, got ", ks.size(),
      " and ", ke.size()
  );
  std::vector<IndexerRow> rows(ks.size());
  for (int64_t i = 0; i < num_queries; ++i) {
    check(ks[i] >= 0, function, ": ks must be >= 0, got ", ks[i], " at index ", i);
    check(
        ke[i] <= num_keys, function, ": ke must be at most the number of keys (", num_keys,
        "), got ", ke[i], " at index ", i
    );
    rows[i] = {.query = i, .begin = ks[i], .end = ke[i]};
  }
  return rows;
}

}  // namespace cpattn
