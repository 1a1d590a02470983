// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/check.h"
#include "cpattn/indexer.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// The arguments of both functions, kept alive while they run.
class FlatIndexer {
 public:
  FlatIndexer(
      const char* function,
      py::handle q,
      py::handle k,
      py::handle weights,
      py::handle ks,
      py::handle ke,
      py::handle k_scale
  )
      : q_(q, "q"), k_(k, "k"), weights_(weights, "weights") {
    if (!k_scale.is_none()) k_scale_.emplace(k_scale, "k_scale");
    const auto begins = index_list(ks, concat(function, ": ks").c_str());
    const auto ends = index_list(ke, concat(function, ": ke").c_str());
    check_tensor(function, "q", *q_, 3);
    keys_ = flat_index_keys(function, *k_, k_scale_ ? std::optional(**k_scale_) : std::nullopt);
    rows_ = flat_indexer_rows(function, begins, ends, q_->shape[0], k_->shape[0]);
    function_ = function;
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

}  // namespace

void register_indexer(py::module_& module) {
  module.def(
      "indexer_logits",
      [](const py::object& q, const py::object& k, const py::object& weights, const py::object& ks,
         const py::object& ke, const py::object& k_scale, const py::object& out) {
        const FlatIndexer given("indexer_logits", q, k, weights, ks, ke, k_scale);
        const TensorArgument logits = output_argument(out, "out");
        const Computation computation;
        indexer_logits(given.arguments(), *logits);
      },
      "q"_a, "k"_a, "weights"_a, "ks"_a, "ke"_a, "k_scale"_a, "out"_a
  );
  module.def(
      "indexer_topk",
      [](const py::object& q, const py::object& k, const py::object& weights, const py::object& ks,
         const py::object& ke, const py::object& k_scale, bool sorted, const py::object& out) {
        const FlatIndexer given("indexer_topk", q, k, weights, ks, ke, k_scale);
        const TensorArgument indices = output_argument(out, "out");
        check_tensor("indexer_topk", "out", *indices, 2);
        const Computation computation;
        indexer_topk(
            given.arguments(), {.topk = indices->shape[1], .sorted = sorted, .indices = *indices}
        );
      },
      "q"_a, "k"_a, "weights"_a, "ks"_a, "ke"_a, "k_scale"_a, "sorted"_a, "out"_a
  );
}

}  // namespace cpattn::bindings
