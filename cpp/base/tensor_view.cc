// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/tensor_view.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

std::pair<uintptr_t, uintptr_t> byte_range(const TensorView& tensor) {
  int64_t last = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    last += (tensor.shape[axis] - 1) * tensor.strides[axis];
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  return {begin, begin + (last + 1) * element_size(tensor.dtype)};
}

}  // namespace

int64_t TensorView::num_elements() const {
  // Axes of size 0 come first: a product of the others need not fit into int64.
  for (int axis = 0; axis < rank; ++axis) {
    if (shape[axis] == 0) return 0;
  }
  int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
  return count;
}

bool TensorView::is_contiguous() const {
  if (num_elements() == 0) return true;
  int64_t expected = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

bool TensorView::last_dim_contiguous() const {
  return rank == 0 || shape[rank - 1] <= 1 || strides[rank - 1] == 1 || num_elements() == 0;
}

std::ostream& operator<<(std::ostream& out, ShapeOf shape) {
  out << '[';
  for (int axis = 0; axis < shape.tensor.rank; ++axis) {
    out << (axis == 0 ? "" : ", ") << shape.tensor.shape[axis];
  }
  return out << ']';
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  if (a.num_elements() == 0 || b.num_elements() == 0) return false;
  const auto [a_begin, a_end] = byte_range(a);
  const auto [b_begin, b_end] = byte_range(b);
  return a_begin < b_end && b_begin < a_end;
}

void check_rank(const ArgumentName& name, int64_t rank) {
  check(
      rank <= TensorView::kMaxRank, name, " has ", rank, " dimensions, at most ",
      TensorView::kMaxRank, " are supported"
  );
}

void check_result(const ArgumentName& name, const TensorView& result) {
  check(result.writable, name, " must be writable");
  for (int axis = 0; axis < result.rank; ++axis) {
    check(
        result.shape[axis] <= 1 || result.strides[axis] > 0 || result.num_elements() == 0, name,
        " must not be a broadcast view (stride 0 in dimension ", axis, ")"
    );
  }
}

void check_tensor(const char* function, const char* name, const TensorView& tensor, int rank) {
  check(
      tensor.rank == rank, function, ": ", name, " must have ", rank, " dimensions, got shape ",
      ShapeOf{tensor}
  );
  check(
      tensor.last_dim_contiguous(), function, ": ", name,
      " must be contiguous in its last dimension, got stride ",
      tensor.rank > 0 ? tensor.strides[tensor.rank - 1] : 0, " for shape ", ShapeOf{tensor}
  );
}

std::pair<TensorView, TensorView> split_last_dim(
    const char* function, const char* name, const TensorView& tensor, int64_t left, int64_t right
) {
  const int axis = tensor.rank - 1;
  check(
      axis >= 0 && tensor.shape[axis] == left + right, function, ": the last dimension of ", name,
      " must be ", left, " + ", right, " = ", left + right, ", got shape ", ShapeOf{tensor}
  );
  check_tensor(function, name, tensor, tensor.rank);
  TensorView first = tensor, second = tensor;
  first.shape[axis] = left;
  second.shape[axis] = right;
  second.data = tensor.as<char>() + left * element_size(tensor.dtype);
  return {first, second};
}

}  // namespace cpattn
