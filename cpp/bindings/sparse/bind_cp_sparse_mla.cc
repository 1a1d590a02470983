// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/sparse/cp_sparse_mla.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_cp_sparse_mla(
    py::handle q,
    py::handle kv,
    py::handle index_q,
    py::handle index_k_cache,
    py::handle weights,
    py::handle metadata,
    py::handle block_tables,
    py::handle page_size,
    py::handle topk,
    py::handle sm_scale,
    py::handle d_v,
    py::handle attn_sink,
    py::handle prefix_lens,
    py::handle index_k_scale,
    py::handle num_threads,
    py::handle out,
    py::handle max_logits,
    py::handle lse
) {
  const Arguments read("cp_sparse_mla");
  const TensorArgument queries = read.tensor(q, "q");
  const TensorArgument latents = read.tensor(kv, "kv");
  const TensorArgument index_queries = read.tensor(index_q, "index_q");
  const TensorArgument index_keys = read.tensor(index_k_cache, "index_k_cache");
  const TensorArgument head_weights = read.tensor(weights, "weights");
  const auto& share = read.value<ContextParallelMetadata>(metadata, "metadata");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  const auto sinks = read.optional_tensor(attn_sink, "attn_sink");
  const auto scales = read.optional_tensor(index_k_scale, "index_k_scale");
  const TensorArgument out_view = read.output(out, "out");
  const TensorArgument max_view = read.output(max_logits, "max_logits");
  const TensorArgument lse_view = read.output(lse, "lse");
  const int threads = read.threads(num_threads);
  const CpSparseMlaArguments arguments{
      .indexer =
          {.q = *index_queries,
           .weights = *head_weights,
           .index_k_cache = *index_keys,
           .k_scale = view_of(scales),
           .block_tables = *tables,
           .page_size = read.integer(page_size, "page_size"),
           .topk = read.integer(topk, "topk"),
           .prefix_lens = read.optional_ints(prefix_lens, "prefix_lens"),
           .num_threads = threads,
           .indices = {}},
      .attention = {
          .q = *queries,
          .kv = *latents,
          .indices = {},
          .scale = read.real(sm_scale, "sm_scale"),
          .v_head_dim = read.integer(d_v, "d_v"),
          .attn_sink = view_of(sinks),
          .topk_length = std::nullopt,
          .out = *out_view,
          .max_logits = *max_view,
          .lse = *lse_view,
          .num_threads = threads
      },
  };
  const Computation computation;
  cp_sparse_mla(share, arguments);
}

}  // namespace

void register_cp_sparse_mla(py::module_& module) {
  module.def(
      "cp_sparse_mla", &run_cp_sparse_mla, "q"_a, "kv"_a, "index_q"_a, "index_k_cache"_a,
      "weights"_a, "metadata"_a, "block_tables"_a, "page_size"_a, "topk"_a, "sm_scale"_a, "d_v"_a,
      "attn_sink"_a, "prefix_lens"_a, "index_k_scale"_a, "num_threads"_a, "out"_a, "max_logits"_a,
      "lse"_a
  );
}

}  // namespace cpattn::bindings
