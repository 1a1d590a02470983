// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Eigen/Core>

#include "cpattn/base/check.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn::reference {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// `count` consecutive elements from `offset` on, as float64.
inline Eigen::RowVectorXd read_row(const TensorView& tensor, int64_t offset, int64_t count) {
  const auto read = [&]<class T>(T) -> Eigen::RowVectorXd {
    using Row = Eigen::Matrix<T, 1, Eigen::Dynamic>;
    return Eigen::Map<const Row>(tensor.as<const T>() + offset, count).template cast<double>();
  };
  switch (tensor.dtype) {
    case DType::float64:
      return read(double{});
    case DType::float32:
      return read(float{});
    case DType::float16:
      return read(Eigen::half{});
    case DType::bfloat16:
      return read(Eigen::bfloat16{});
    default:
      check(false, "reference: dtype must be a floating-point type, got ", tensor.dtype);
      __builtin_unreachable();
  }
}

inline double read_element(const TensorView& tensor, int64_t offset) {
  return read_row(tensor, offset, 1)(0);
}

}  // namespace cpattn::reference
