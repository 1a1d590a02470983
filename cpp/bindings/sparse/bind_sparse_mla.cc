// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/sparse/sparse_mla.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_flash_mla(
    py::handle q,
    py::handle kv,
    py::handle indices,
    py::handle sm_scale,
    py::handle d_v,
    py::handle attn_sink,
    py::handle topk_length,
    py::handle num_threads,
    py::handle out,
    py::handle max_logits,
    py::handle lse
) {
  const Arguments read("flash_mla_sparse_fwd");
  const TensorArgument q_view = read.tensor(q, "q");
  const TensorArgument kv_view = read.tensor(kv, "kv");
  const TensorArgument indices_view = read.tensor(indices, "indices");
  const auto sink_view = read.optional_tensor(attn_sink, "attn_sink");
  const TensorArgument out_view = read.output(out, "out");
  const TensorArgument max_view = read.output(max_logits, "max_logits");
  const TensorArgument lse_view = read.output(lse, "lse");
  const SparseMlaArguments arguments{
      .q = *q_view,
      .kv = *kv_view,
      .indices = *indices_view,
      .scale = read.real(sm_scale, "sm_scale"),
      .v_head_dim = read.integer(d_v, "d_v"),
      .attn_sink = view_of(sink_view),
      .topk_length = read.optional_ints(topk_length, "topk_length"),
      .out = *out_view,
      .max_logits = *max_view,
      .lse = *lse_view,
      .num_threads = read.threads(num_threads),
  };
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
