// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/context_parallel/cp_attention.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run(
    py::handle q,
    py::handle k_cache,
    py::handle v_cache,
    py::handle metadata,
    py::handle block_tables,
    py::handle page_size,
    py::handle num_heads,
    py::handle num_kv_heads,
    py::handle scale,
    py::handle out,
    py::handle lse
) {
  const Arguments read("do_cp_attn_fia");
  const TensorArgument queries = read.tensor(q, "q");
  const TensorArgument keys = read.tensor(k_cache, "k_cache");
  const TensorArgument values = read.tensor(v_cache, "v_cache");
  const auto& share = read.value<ContextParallelMetadata>(metadata, "metadata");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  const TensorArgument output = read.output(out, "out");
  const auto lse_output = read.optional_output(lse, "lse");
  const CpAttentionArguments arguments{
      .q = *queries,
      .k_cache = *keys,
      .v_cache = *values,
      .block_tables = *tables,
      .page_size = read.integer(page_size, "page_size"),
      .num_heads = read.integer(num_heads, "num_heads"),
      .num_kv_heads = read.integer(num_kv_heads, "num_kv_heads"),
      .scale = read.real(scale, "scale"),
      .out = *output,
      .lse = view_of(lse_output),
  };
  const Computation computation;
  do_cp_attn_fia(share, arguments);
}

}  // namespace

void register_cp_attention(py::module_& module) {
  module.def(
      "do_cp_attn_fia", &run, "q"_a, "k_cache"_a, "v_cache"_a, "metadata"_a, "block_tables"_a,
      "page_size"_a, "num_heads"_a, "num_kv_heads"_a, "scale"_a, "out"_a, "lse"_a
  );
}

}  // namespace cpattn::bindings
