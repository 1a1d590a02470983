// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstring>

#include "cpattn/base/parallel.h"
#include "cpattn/reference/reference.h"
#include "reference/codes.h"
#include "reference/rows.h"

namespace cpattn::reference {
namespace {

/// The dimension of the rows of x, which is [num_rows, dim].
int64_t row_dim(const char* function, const TensorView& x) {
  check(
      x.rank == 2 && x.last_dim_contiguous(), "reference.", function,
      ": x must be two-dimensional with a contiguous last dimension, got shape ", ShapeOf{x}
  );
  return x.dim(1);
}

/// Reads a weight or bias of the norm.
Eigen::RowVectorXd read_parameter(const char* name, const TensorView& tensor, int64_t dim) {
  check(
      tensor.rank == 1 && tensor.dim(0) == dim && tensor.last_dim_contiguous(),
      "reference.rms_norm: ", name, " must be contiguous [", dim, "], got shape ", ShapeOf{tensor}
  );
  return read_row(tensor, 0, dim);
}

/// Calls compute(i, row) for row i of x, unless rows are empty.
template <class F>
void for_each_row(const TensorView& x, const F& compute) {
  const int64_t count = x.num_elements() == 0 ? 0 : x.dim(0);
  parallel_for(count, 1, [&](int64_t i, StopToken&) {
    compute(i, read_row(x, i * x.stride(0), x.dim(1)));
  });
}

}  // namespace

void rms_norm(
    const TensorView& x,
    const TensorView& weight,
    const std::optional<TensorView>& bias,
    double eps,
    const TensorView& out
) {
  const int64_t dim = row_dim("rms_norm", x);
  check(eps >= 0, "reference.rms_norm: eps must be >= 0, got ", eps);
  const Eigen::RowVectorXd scale = read_parameter("weight", weight, dim);
  const Eigen::RowVectorXd shift =
      bias ? read_parameter("bias", *bias, dim) : Eigen::RowVectorXd(Eigen::RowVectorXd::Zero(dim));
  for_each_row(x, [&](int64_t i, const Eigen::RowVectorXd& row) {
    const double norm = std::sqrt(row.squaredNorm() / static_cast<double>(dim) + eps);
    Eigen::Map<Eigen::RowVectorXd>(out.as<double>() + i * dim, dim) =
        row.cwiseProduct(scale) / norm + shift;
  });
}

void hadamard_transform(const TensorView& x, double scale, const TensorView& out) {
  const int64_t dim = row_dim("hadamard_transform", x);
  check(
      std::has_single_bit(static_cast<uint64_t>(dim)),
      "reference.hadamard_transform: x must have a power of two columns, got shape ", ShapeOf{x}
  );
  const auto sign = [](int64_t i, int64_t j) {
    return std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? 1.0 : -1.0;
  };
  for_each_row(x, [&](int64_t i, const Eigen::RowVectorXd& row) {
    Eigen::Map<Eigen::RowVectorXd> result(out.as<double>() + i * dim, dim);
    for (int64_t j = 0; j < dim; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < dim; ++k) sum += row(k) * sign(k, j);
      result(j) = scale * sum;
    }
  });
}

void dequantize_kv_rows(const TensorView& rows, const TensorView& out) {
  check(
      rows.rank == 2 && rows.dim(1) == 656 && rows.is_contiguous() && element_size(rows.dtype) == 1,
      "reference.dequantize_kv_rows: rows must be contiguous bytes [n, 656], got ", rows.dtype,
      " of shape ", ShapeOf{rows}
  );
  parallel_for(rows.dim(0), 1, [&](int64_t i, StopToken&) {
    const auto* row = rows.as<const uint8_t>() + i * 656;
    double* to = out.as<double>() + i * 576;
    for (int j = 0; j < 512; ++j) {
      float scale;
      std::memcpy(&scale, row + 512 + j / 128 * 4, sizeof scale);
      to[j] = float8_e4m3fn(row[j]) * double{scale};
    }
    for (int j = 0; j < 64; ++j) {
      Eigen::bfloat16 number;
      std::memcpy(&number, row + 528 + j * 2, sizeof number);
      to[512 + j] = static_cast<double>(number);
    }
  });
}

}  // namespace cpattn::reference
