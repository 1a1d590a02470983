// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/kv_rows.h"

#include <algorithm>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/rows.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

using kernels::kKvCodeBytes;
using kernels::kKvCodes;
using kernels::kKvDim;
using kernels::kKvRope;
using kernels::kKvRowBytes;

/// Rows that are prefetched: the processor cannot predict indices.
constexpr int64_t kRowsAhead = 4;

void fetch_row(const char* row) {
  for (int64_t i = 0; i < kKvRowBytes; i += 64) __builtin_prefetch(row + i);
}

/// Checks that a part of the rows is [T, dim] or [T, 1, dim].
void check_part(const char* function, const char* name, const TensorView& tensor, int64_t dim) {
  check_rank(function, name, tensor, 2, 3);
  check(
      tensor.dim(tensor.rank - 1) == dim && (tensor.rank == 2 || tensor.dim(1) == 1), function,
      ": ", name, " must be [num_tokens, ", dim, "] or [num_tokens, 1, ", dim, "], got ",
      ShapeOf{tensor}
  );
}

}  // namespace

void quantize_kv_rows(
    const char* function,
    const TensorView& nope,
    const TensorView& rope,
    const TensorView& codes,
    const TensorView& rope_out
) {
  const auto type = element_type(function, "nope", nope.dtype);
  check_part(function, "nope", nope, kKvCodes);
  check_part(function, "rope", rope, kKvRope);
  check_dtype(function, "rope", rope.dtype, nope.dtype);
  check(
      rope.dim(0) == nope.dim(0), function, ": rope must have the ", nope.dim(0),
      " tokens of nope, got ", rope.dim(0)
  );
  check_dtype(function, "codes", codes.dtype, DType::uint8);
  check_dtype(function, "rope_out", rope_out.dtype, DType::uint8);
  check_rows(function, "codes", codes, {nope.dim(0), 1, kKvCodeBytes});
  check_rows(function, "rope_out", rope_out, {nope.dim(0), 1, kKvRowBytes - kKvCodeBytes});
  for (const TensorView& result : {codes, rope_out}) {
    check_no_overlap(function, "out", result, "nope", nope);
    check_no_overlap(function, "out", result, "rope", rope);
  }
  const auto quantize = active_sparse_kernels().rows.quantize_kv_row[type];
  parallel_rows(nope.dim(0), kKvDim * element_size(nope.dtype), [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      quantize(
          row_data(nope, row), row_data(rope, row), row_data(codes, row), row_data(rope_out, row)
      );
    }
  });
}

void dequantize_kv_rows(
    const TensorView& rows, std::optional<std::span<const int64_t>> indices, const TensorView& out
) {
  constexpr char kFunction[] = "dequantize_kv_rows";
  check_rank(kFunction, "rows", rows, 2, 5);
  check(
      rows.dtype == DType::uint8 || rows.dtype == DType::float8_e4m3fn, kFunction,
      ": rows must be uint8 or float8_e4m3fn, got ", rows.dtype
  );
  check(
      rows.dim(rows.rank - 1) == kKvRowBytes, kFunction, ": rows must be ", kKvRowBytes,
      " bytes wide, got shape ", ShapeOf{rows}
  );
  const int64_t available = num_rows(rows);
  for (std::size_t i = 0; indices && i < indices->size(); ++i) {
    const int64_t index = (*indices)[i];
    check(
        index >= 0 && index < available, kFunction, ": indices must be in [0, ", available,
        "), got ", index, " at index ", i
    );
  }
  const int64_t count = indices ? static_cast<int64_t>(indices->size()) : available;
  check_dtype(kFunction, "out", out.dtype, DType::bfloat16);
  check_rows(kFunction, "out", out, {count, 1, kKvDim});
  check_no_overlap(kFunction, "out", out, "rows", rows);
  const auto expand = active_sparse_kernels().rows.expand_kv_row;
  const auto source = [&](int64_t row) { return row_data(rows, indices ? (*indices)[row] : row); };
  parallel_rows(count, kKvRowBytes, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      if (indices) fetch_row(source(std::min(row + kRowsAhead, end - 1)));
      expand(source(row), row_data(out, row));
    }
  });
}

}  // namespace cpattn
