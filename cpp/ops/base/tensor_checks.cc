// SPDX-License-Identifier: Apache-2.0
#include "ops/base/tensor_checks.h"

#include <algorithm>
#include <cmath>

#include "cpattn/base/check.h"

namespace cpattn {

void check_shape(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
) {
  TensorView expected;
  expected.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), expected.shape.begin());
  check(
      tensor.rank == expected.rank && std::equal(shape.begin(), shape.end(), tensor.shape.begin()),
      function, ": ", name, " must have shape ", ShapeOf{expected}, ", got ", ShapeOf{tensor}
  );
}

void check_rows(
    const char* function,
    const char* name,
    const TensorView& tensor,
    std::initializer_list<int64_t> shape
) {
  check_tensor(function, name, tensor, static_cast<int>(shape.size()));
  check_shape(function, name, tensor, shape);
}

void check_dtype(const char* function, const char* name, DType dtype, DType expected) {
  check(dtype == expected, function, ": ", name, " must be ", expected, ", got ", dtype);
}

void check_scale(const char* function, const char* name, double scale) {
  constexpr double kSmallest = 1e-37, kLargest = 1e38;
  check(
      std::isfinite(scale) && scale > 0, function, ": ", name, " must be a positive number, got ",
      scale
  );
  check(
      scale >= kSmallest && scale <= kLargest, function, ": ", name, " must be in [", kSmallest,
      ", ", kLargest, "], the range of float32, got ", scale
  );
}

void check_softcap(const char* function, double softcap) {
  constexpr double kSmallest = 1e-37, kLargest = 1e37;
  check(
      softcap == 0 || (softcap >= kSmallest && softcap <= kLargest), function,
      ": softcap must be 0 (none) or in [", kSmallest, ", ", kLargest,
      "], the range of float32, got ", softcap
  );
}

TensorView view_of(const IndexTable& table) {
  return {
      .data = const_cast<void*>(table.data),
      .dtype = table.is_int64 ? DType::int64 : DType::int32,
      .rank = 2,
      .shape = {table.rows, table.columns},
      .strides = {table.row_stride, table.column_stride},
  };
}

void check_no_overlap(
    const char* function,
    const char* out_name,
    const TensorView& out,
    const char* name,
    const TensorView& argument
) {
  check(
      !may_overlap(out, argument), function, ": ", out_name, " must not overlap ", name,
      " in memory"
  );
}

}  // namespace cpattn
