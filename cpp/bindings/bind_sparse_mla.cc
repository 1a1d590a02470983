// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/num_threads.h"
#include "bindings/tensor_argument.h"
#include "cpattn/sparse_mla.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_flash_mla(
    const py::object& q,
    const py::object& kv,
    const py::object& indices,
    double sm_scale,
    int64_t d_v,
    const py::object& attn_sink,
    const py::object& topk_length,
    std::optional<int> num_threads,
    const py::object& out,
    const py::object& max_logits,
    const py::object& lse
) {
  const TensorArgument q_view(q, "q"), kv_view(kv, "kv"), indices_view(indices, "indices");
  const TensorArgument out_view = output_argument(out, "out");
  const TensorArgument max_view = output_argument(max_logits, "max_logits");
  const TensorArgument lse_view = output_argument(lse, "lse");
  const auto sink_view = optional_tensor(attn_sink, "attn_sink");
  SparseMlaArguments arguments{
      .q = *q_view,
      .kv = *kv_view,
      .indices = *indices_view,
      .scale = sm_scale,
      .v_head_dim = d_v,
      .out = *out_view,
      .max_logits = *max_view,
      .lse = *lse_view,
      .num_threads = parse_threads("flash_mla_sparse_fwd", num_threads),
  };
  if (sink_view) arguments.attn_sink = **sink_view;
  if (!topk_length.is_none()) {
    arguments.topk_length = index_list(topk_length, "flash_mla_sparse_fwd: topk_length");
  }
  const Computation computation;
  flash_mla_sparse_fwd(arguments);
}

}  // namespace

void register_sparse_mla(py::module_& module) {
  module.def(
      "flash_mla_sparse_fwd", &run_flash_mla, "q"_a, "kv"_a, "indices"_a, "sm_scale"_a, "d_v"_a,
      "attn_sink"_a, "topk_length"_a, "num_threads"_a, "out"_a, "max_logits"_a, "lse"_a
  );
}

}  // namespace cpattn::bindings
