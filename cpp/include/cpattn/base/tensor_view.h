// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cassert>
#include <cstdint>
#include <span>
#include <utility>

#include "cpattn/base/argument_name.h"
#include "cpattn/base/dtype.h"

namespace cpattn {

/// A borrowed n-dimensional array, never an owner: data, dtype, shape, and
/// strides counted in elements. Strides are non-negative. The caller keeps the
/// memory alive; nothing here reads or writes an element.
struct TensorView {
  static constexpr int kMaxRank = 6;

  void* data = nullptr;
  DType dtype = DType::float32;
  int rank = 0;
  bool writable = false;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  int64_t dim(int axis) const {
    assert(axis >= 0 && axis < rank);
    return shape[axis];
  }
  int64_t stride(int axis) const {
    assert(axis >= 0 && axis < rank);
    return strides[axis];
  }
  int64_t num_elements() const;
  /// Whether the elements are one block without gaps, in row-major order.
  bool is_contiguous() const;
  /// Whether neighbours in the last dimension are neighbours in memory. Strides of axes of size one
  /// and of empty tensors have no meaning and are ignored.
  bool last_dim_contiguous() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

/// Prints a shape as [2, 3, 4] in a check() message.
struct ShapeOf {
  const TensorView& tensor;
};
std::ostream& operator<<(std::ostream& out, ShapeOf shape);

/// Whether the bytes spanned by `a` and `b` intersect. Conservative: strided
/// views that interleave without sharing an element count as overlapping.
bool may_overlap(const TensorView& a, const TensorView& b);

/// Throws std::invalid_argument, which begins with `name`, for more than kMaxRank dimensions.
void check_rank(const ArgumentName& name, int64_t rank);

/// Throws std::invalid_argument, which begins with `name`, unless a result can be written: it must
/// be writable and must not broadcast, with a stride of zero over more than one element.
void check_result(const ArgumentName& name, const TensorView& result);

/// Throws std::invalid_argument, which names `function` and `name`, unless an argument of a public
/// function has this rank and a contiguous last dimension.
void check_tensor(const char* function, const char* name, const TensorView& tensor, int rank);

/// Returns views of the first `left` elements of the last dimension and of the `right` ones that
/// follow. Throws std::invalid_argument, which names `function` and `name`, unless that dimension
/// is left + right.
std::pair<TensorView, TensorView> split_last_dim(
    const char* function, const char* name, const TensorView& tensor, int64_t left, int64_t right
);

}  // namespace cpattn
