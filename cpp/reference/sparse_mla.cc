// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>

#include "cpattn/base/parallel.h"
#include "cpattn/reference/reference.h"
#include "reference/rows.h"

namespace cpattn::reference {
namespace {

constexpr const char* kName = "reference.flash_mla_sparse_fwd: ";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_batch(const SparseMla& batch) {
  check_tensor("reference.flash_mla_sparse_fwd", "q", batch.q, 3);
  check_tensor("reference.flash_mla_sparse_fwd", "kv", batch.kv, 3);
  check(
      batch.kv.dim(1) == 1 && batch.kv.dim(2) == batch.q.dim(2), kName, "kv must be [s_kv, 1, ",
      batch.q.dim(2), "], got shape ", ShapeOf{batch.kv}
  );
  check(
      batch.indices.rows == batch.q.dim(0), kName, "indices must have ", batch.q.dim(0),
      " rows, got ", batch.indices.rows
  );
  check(
      batch.v_head_dim >= 0 && batch.v_head_dim <= batch.q.dim(2), kName, "d_v must be in [0, ",
      batch.q.dim(2), "], got ", batch.v_head_dim
  );
  check(
      !batch.topk_length || static_cast<int64_t>(batch.topk_length->size()) == batch.q.dim(0),
      kName, "topk_length must have ", batch.q.dim(0), " entries"
  );
  for (int64_t i = 0; batch.topk_length && i < batch.q.dim(0); ++i) {
    const int64_t length = (*batch.topk_length)[i];
    check(
        length >= 0 && length <= batch.indices.columns, kName, "topk_length must be in [0, ",
        batch.indices.columns, "], got ", length, " at index ", i
    );
  }
  check(
      !batch.attn_sink || (batch.attn_sink->rank == 1 && batch.attn_sink->dim(0) == batch.q.dim(1)),
      kName, "attn_sink must be [", batch.q.dim(1), "]"
  );
}

/// Gathers the rows of kv that a token names: [keys, head_dim].
Matrix gather(const SparseMla& batch, int64_t token) {
  const int64_t n = batch.topk_length ? (*batch.topk_length)[token] : batch.indices.columns;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t index = batch.indices.at(token, i);
    if (index >= 0 && index < batch.kv.dim(0)) keys.push_back(index);
  }
  Matrix rows(static_cast<int64_t>(keys.size()), batch.kv.dim(2));
  for (int64_t i = 0; i < rows.rows(); ++i) {
    rows.row(i) = read_row(batch.kv, keys[i] * batch.kv.stride(0), rows.cols());
  }
  return rows;
}

}  // namespace

void flash_mla_sparse_fwd(
    const SparseMla& batch,
    const TensorView& out,
    const TensorView& max_logits,
    const TensorView& lse
) {
  check_batch(batch);
  const int64_t num_heads = batch.q.dim(1), v_dim = batch.v_head_dim;
  const auto attend = [&](int64_t token, StopToken&) {
    const Matrix keys = gather(batch, token);
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = token * num_heads + head;
      Eigen::Map<Eigen::RowVectorXd> row(out.as<double>() + place * v_dim, v_dim);
      row.setZero();
      max_logits.as<double>()[place] = lse.as<double>()[place] = -kInfinity;
      if (keys.rows() == 0) continue;
      const auto q =
          read_row(batch.q, token * batch.q.stride(0) + head * batch.q.stride(1), keys.cols());
      const Eigen::ArrayXd scores = batch.scale * (keys * q.transpose());
      const double max = scores.maxCoeff<Eigen::PropagateNaN>();
      const Eigen::ArrayXd weights = (scores - max).unaryExpr([](double x) { return std::exp(x); });
      const double sink = batch.attn_sink
                              ? read_element(*batch.attn_sink, head * batch.attn_sink->stride(0))
                              : -kInfinity;
      row = weights.matrix().transpose() * keys.leftCols(v_dim);
      row /= weights.sum() + std::exp(sink - max);
      max_logits.as<double>()[place] = max;
      lse.as<double>()[place] = max + std::log(weights.sum());
    }
  };
  parallel_for(batch.q.dim(0), default_num_threads(), attend);
}

}  // namespace cpattn::reference
