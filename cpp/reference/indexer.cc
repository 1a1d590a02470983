// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "cpattn/base/parallel.h"
#include "cpattn/reference/reference.h"
#include "reference/rows.h"

namespace cpattn::reference {
namespace {

Matrix read_rows(const TensorView& tensor, int64_t offset, int64_t stride, int64_t count) {
  Matrix rows(count, tensor.dim(tensor.rank - 1));
  for (int64_t i = 0; i < count; ++i) {
    rows.row(i) = read_row(tensor, offset + i * stride, rows.cols());
  }
  return rows;
}

void check_indexer(const Indexer& indexer) {
  const TensorView &q = indexer.q, &k = indexer.k, &weights = indexer.weights;
  check(
      q.rank == 3 && k.rank == 2 && q.dim(2) == k.dim(1) && q.last_dim_contiguous() &&
          k.last_dim_contiguous(),
      "reference.indexer_logits: q and k must be [T, H, D] and [S, D], got ", ShapeOf{q}, " and ",
      ShapeOf{k}
  );
  const int64_t num_queries = q.dim(0), num_heads = q.dim(1), num_keys = k.dim(0);
  check(
      weights.rank == 2 && weights.dim(0) == num_queries && weights.dim(1) == num_heads &&
          weights.last_dim_contiguous(),
      "reference.indexer_logits: weights must be [T, H], got ", ShapeOf{weights}
  );
  check(
      !indexer.k_scale || (indexer.k_scale->rank == 1 && indexer.k_scale->dim(0) == num_keys),
      "reference.indexer_logits: k_scale must be [S]"
  );
  check(
      std::ssize(indexer.ks) == num_queries && std::ssize(indexer.ke) == num_queries,
      "reference.indexer_logits: ks and ke must have an entry for each of ", num_queries, " queries"
  );
  for (int64_t i = 0; i < num_queries; ++i) {
    const int64_t begin = indexer.ks[i], end = indexer.ke[i];
    check(
        begin >= end || (begin >= 0 && end <= num_keys), "reference.indexer_logits: keys [", begin,
        ", ", end, ") of query ", i, " are not among ", num_keys
    );
  }
}

}  // namespace

void indexer_logits(const Indexer& indexer, const TensorView& logits) {
  check_indexer(indexer);
  const TensorView &q = indexer.q, &k = indexer.k, &weights = indexer.weights;
  const int64_t num_queries = q.dim(0), num_heads = q.dim(1), num_keys = k.dim(0);
  const Matrix keys = read_rows(k, 0, k.stride(0), num_keys);
  Eigen::Map<Matrix> out(logits.as<double>(), num_queries, num_keys);
  const auto score = [&](int64_t i, StopToken&) {
    out.row(i).setConstant(-std::numeric_limits<double>::infinity());
    const int64_t begin = indexer.ks[i], end = indexer.ke[i];
    if (begin >= end) return;
    const Matrix query = read_rows(q, i * q.stride(0), q.stride(1), num_heads);
    const Eigen::RowVectorXd weight = read_row(weights, i * weights.stride(0), num_heads);
    const Matrix products = query * keys.middleRows(begin, end - begin).transpose();
    out.row(i).segment(begin, end - begin) = weight * products.cwiseMax(0.0);
    if (!indexer.k_scale) return;
    for (int64_t j = begin; j < end; ++j) {
      out(i, j) *= read_element(*indexer.k_scale, j * indexer.k_scale->stride(0));
    }
  };
  parallel_for(num_queries, 1, score);
}

}  // namespace cpattn::reference
