// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "cpattn/base/parallel.h"
#include "cpattn/reference/reference.h"
#include "reference/rows.h"

namespace cpattn::reference {

void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b,
    const TensorView& out,
    const TensorView& lse
) {
  check_tensor("reference.merge_state", "out_a", out_a, 3);
  check(
      out.rank == 3 && out.shape == out_a.shape, "reference.merge_state: out must be ",
      ShapeOf{out_a}, " like out_a, got ", ShapeOf{out}
  );
  const int64_t rows = out.dim(0), heads = out.dim(1), dim = out.dim(2);
  const struct {
    const char* name;
    const TensorView &out, &lse;
  } parts[] = {{"a", out_a, lse_a}, {"b", out_b, lse_b}};
  for (const auto& part : parts) {
    check(
        part.out.rank == 3 && part.out.shape == out.shape && part.out.last_dim_contiguous() &&
            part.lse.rank == 2 && part.lse.dim(0) == rows && part.lse.dim(1) == heads,
        "reference.merge_state: out_", part.name, " and lse_", part.name, " must be ", ShapeOf{out},
        " and ", ShapeOf{lse}, ", got ", ShapeOf{part.out}, " and ", ShapeOf{part.lse}
    );
  }
  const auto merge_row = [&](int64_t row, StopToken&) {
    for (int64_t head = 0; head < heads; ++head) {
      const auto lse_of = [&](const TensorView& tensor) {
        return read_element(tensor, row * tensor.stride(0) + head * tensor.stride(1));
      };
      const double max = std::max(lse_of(lse_a), lse_of(lse_b));
      Eigen::RowVectorXd weighted = Eigen::RowVectorXd::Zero(dim);
      double sum = 0;
      for (const auto& part : parts) {
        const double part_lse = lse_of(part.lse);
        if (part_lse == -std::numeric_limits<double>::infinity()) continue;
        const double weight = std::exp(part_lse - max);
        sum += weight;
        weighted +=
            weight * read_row(part.out, row * part.out.stride(0) + head * part.out.stride(1), dim);
      }
      const int64_t index = row * heads + head;
      if (sum > 0) weighted /= sum;
      Eigen::Map<Eigen::RowVectorXd>(out.as<double>() + index * dim, dim) = weighted;
      lse.as<double>()[index] = max + std::log(sum);
    }
  };
  parallel_for(lse.num_elements() == 0 ? 0 : rows, 1, merge_row);
}

}  // namespace cpattn::reference
