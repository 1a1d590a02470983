// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/dcp_local_indices.h"

#include <algorithm>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "dcp_local_indices";

void check_matrix(const char* name, const TensorView& tensor) {
  check_tensor(kFunction, name, tensor, 2);
  check(tensor.dtype == DType::int32, kFunction, ": ", name, " must be int32, got ", tensor.dtype);
}

}  // namespace

void dcp_local_indices(
    const TensorView& indices,
    int64_t dcp_rank,
    int64_t dcp_size,
    int64_t interleave_size,
    const TensorView& local
) {
  check_matrix("indices", indices);
  check_matrix("out", local);
  check(
      local.shape == indices.shape, kFunction, ": out must have the shape of indices, ",
      ShapeOf{indices}, ", got ", ShapeOf{local}
  );
  check(!may_overlap(indices, local), kFunction, ": out must not overlap indices");
  check(dcp_size >= 1, kFunction, ": dcp_size must be >= 1, got ", dcp_size);
  check(
      dcp_rank >= 0 && dcp_rank < dcp_size, kFunction, ": dcp_rank must be in [0, ", dcp_size,
      "), got ", dcp_rank
  );
  check(interleave_size >= 1, kFunction, ": interleave_size must be >= 1, got ", interleave_size);
  const int64_t topk = indices.shape[1];
  const int64_t period = int64_t{narrow_to_int32(dcp_size, "dcp_local_indices: dcp_size")} *
                         narrow_to_int32(interleave_size, "dcp_local_indices: interleave_size");
  const int64_t first = dcp_rank * interleave_size;
  for (int64_t row = 0; row < indices.shape[0]; ++row) {
    const int32_t* from = indices.as<const int32_t>() + row * indices.strides[0];
    int32_t* to = local.as<int32_t>() + row * local.strides[0];
    int32_t* const end = to + topk;
    for (int64_t i = 0; i < topk; ++i) {
      const int64_t turn = from[i] / period;
      const int64_t offset = from[i] - turn * period - first;
      *to = static_cast<int32_t>(turn * interleave_size + offset);
      to += from[i] >= 0 && offset >= 0 && offset < interleave_size ? 1 : 0;
    }
    std::fill(to, end, -1);
  }
}

}  // namespace cpattn
