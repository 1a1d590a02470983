// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/sparse/indexer.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// The arguments of both functions, kept alive while they run.
class FlatIndexer {
 public:
  FlatIndexer(
      const Arguments& read,
      py::handle q,
      py::handle k,
      py::handle weights,
      py::handle ks,
      py::handle ke,
      py::handle k_scale
  )
      : function_(read.function()),
        q_(read.tensor(q, "q")),
        k_(read.tensor(k, "k")),
        weights_(read.tensor(weights, "weights")),
        k_scale_(read.optional_tensor(k_scale, "k_scale")) {
    const std::vector<int64_t> begins = read.ints(ks, "ks");
    const std::vector<int64_t> ends = read.ints(ke, "ke");
    check_tensor(function_, "q", *q_, 3);
    keys_ = flat_index_keys(function_, *k_, view_of(k_scale_));
    rows_ = flat_indexer_rows(function_, begins, ends, q_->shape[0], k_->shape[0]);
  }

  IndexerArguments arguments() const {
    return {
        .function = function_,
        .q = *q_,
        .weights = *weights_,
        .keys = keys_,
        .pages = pages_,
        .rows = rows_,
    };
  }

 private:
  const char* function_;
  TensorArgument q_, k_, weights_;
  std::optional<TensorArgument> k_scale_;
  IndexKeys keys_;
  std::vector<IndexerRow> rows_;
  const PageTable pages_{.indptr = {0, 1}, .page_ids = {0}};
};

void run_logits(
    py::handle q,
    py::handle k,
    py::handle weights,
    py::handle ks,
    py::handle ke,
    py::handle k_scale,
    py::handle out
) {
  const Arguments read("indexer_logits");
  const FlatIndexer given(read, q, k, weights, ks, ke, k_scale);
  const TensorArgument logits = read.output(out, "out");
  const Computation computation;
  indexer_logits(given.arguments(), *logits);
}

void run_topk(
    py::handle q,
    py::handle k,
    py::handle weights,
    py::handle ks,
    py::handle ke,
    py::handle k_scale,
    py::handle sorted,
    py::handle out,
    py::handle values
) {
  const Arguments read("indexer_topk");
  const FlatIndexer given(read, q, k, weights, ks, ke, k_scale);
  const bool by_score = read.flag(sorted, "sorted");
  const TensorArgument indices = read.output(out, "out");
  check_tensor(read.function(), "out", *indices, 2);
  const std::optional<TensorArgument> scores = read.optional_output(values, "values");
  const Computation computation;
  indexer_topk(
      given.arguments(), {.topk = indices->shape[1],
                          .sorted = by_score,
                          .indices = *indices,
                          .values = view_of(scores)}
  );
}

}  // namespace

void register_indexer(py::module_& module) {
  module.def(
      "indexer_logits", &run_logits, "q"_a, "k"_a, "weights"_a, "ks"_a, "ke"_a, "k_scale"_a, "out"_a
  );
  module.def(
      "indexer_topk", &run_topk, "q"_a, "k"_a, "weights"_a, "ks"_a, "ke"_a, "k_scale"_a, "sorted"_a,
      "out"_a, "values"_a = py::none()
  );
}

}  // namespace cpattn::bindings
