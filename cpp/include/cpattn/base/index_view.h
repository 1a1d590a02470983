// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The numbers of a one-dimensional tensor of int32 or int64.
inline std::vector<int64_t> index_values(const TensorView& tensor) {
  std::vector<int64_t> values(tensor.dim(0));
  for (int64_t i = 0; i < tensor.dim(0); ++i) {
    const int64_t at = i * tensor.stride(0);
    values[i] = tensor.dtype == DType::int64 ? tensor.as<int64_t>()[at] : tensor.as<int32_t>()[at];
  }
  return values;
}

/// A two-dimensional tensor of int32 or int64 as a table.
inline IndexTable index_table(const TensorView& tensor) {
  return {
      .data = tensor.data,
      .is_int64 = tensor.dtype == DType::int64,
      .rows = tensor.dim(0),
      .columns = tensor.dim(1),
      .row_stride = tensor.stride(0),
      .column_stride = tensor.stride(1)
  };
}

}  // namespace cpattn
