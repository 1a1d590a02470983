// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The number of rows of a tensor: the product of all dimensions but the last.
inline int64_t num_rows(const TensorView& tensor) {
  int64_t count = 1;
  for (int axis = 0; axis + 1 < tensor.rank; ++axis) count *= tensor.dim(axis);
  return count;
}

/// The address of a row, counted in row-major order.
inline char* row_data(const TensorView& tensor, int64_t row) {
  int64_t offset = 0;
  for (int axis = tensor.rank - 2; axis > 0; --axis) {
    offset += row % tensor.dim(axis) * tensor.stride(axis);
    row /= tensor.dim(axis);
  }
  if (tensor.rank >= 2) offset += row * tensor.stride(0);
  return tensor.as<char>() + offset * element_size(tensor.dtype);
}

/// Checks that there are min_rank to max_rank dimensions, and that the last one is contiguous.
inline void check_rank(
    const char* function, const char* name, const TensorView& tensor, int min_rank, int max_rank
) {
  check(
      tensor.rank >= min_rank && tensor.rank <= max_rank, function, ": ", name, " must have ",
      min_rank, " to ", max_rank, " dimensions, got shape ", ShapeOf{tensor}
  );
  check_tensor(function, name, tensor, tensor.rank);
}

/// Calls function(first, end) for ranges of [0, count) that are long enough to be worth a
/// thread: about 2^17 bytes of `row_bytes` each.
template <class F>
void parallel_rows(int64_t count, int64_t row_bytes, const F& function) {
  const int64_t step = std::max<int64_t>(1, (int64_t{1} << 17) / std::max<int64_t>(1, row_bytes));
  parallel_for((count + step - 1) / step, default_num_threads(), [&](int64_t item, StopToken&) {
    function(item * step, std::min(count, (item + 1) * step));
  });
}

}  // namespace cpattn
