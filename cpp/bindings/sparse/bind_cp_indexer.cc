// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/sparse/cp_indexer.h"
#include "cpattn/sparse/dcp_local_indices.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_cp_indexer_topk(
    py::handle q,
    py::handle index_k_cache,
    py::handle weights,
    py::handle metadata,
    py::handle block_tables,
    py::handle page_size,
    py::handle topk,
    py::handle prefix_lens,
    py::handle k_scale,
    py::handle sorted,
    py::handle num_threads,
    py::handle out
) {
  const Arguments read("cp_indexer_topk");
  const TensorArgument queries = read.tensor(q, "q");
  const TensorArgument keys = read.tensor(index_k_cache, "index_k_cache");
  const TensorArgument head_weights = read.tensor(weights, "weights");
  const auto& share = read.value<ContextParallelMetadata>(metadata, "metadata");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  const auto scales = read.optional_tensor(k_scale, "k_scale");
  const TensorArgument output = read.output(out, "out");
  const CpIndexerArguments arguments{
      .q = *queries,
      .weights = *head_weights,
      .index_k_cache = *keys,
      .k_scale = view_of(scales),
      .block_tables = *tables,
      .page_size = read.integer(page_size, "page_size"),
      .topk = read.integer(topk, "topk"),
      .prefix_lens = read.optional_ints(prefix_lens, "prefix_lens"),
      .sorted = read.flag(sorted, "sorted"),
      .num_threads = read.threads(num_threads),
      .indices = *output,
  };
  const Computation computation;
  cp_indexer_topk(share, arguments);
}

void run_dcp_local_indices(
    py::handle indices,
    py::handle dcp_rank,
    py::handle dcp_size,
    py::handle interleave_size,
    py::handle out
) {
  const Arguments read("dcp_local_indices");
  const TensorArgument global = read.tensor(indices, "indices");
  const int64_t rank = read.integer(dcp_rank, "dcp_rank");
  const int64_t size = read.integer(dcp_size, "dcp_size");
  const int64_t interleave = read.integer(interleave_size, "interleave_size");
  const TensorArgument local = read.output(out, "out");
  const Computation computation;
  dcp_local_indices(*global, rank, size, interleave, *local);
}

}  // namespace

void register_cp_indexer(py::module_& module) {
  module.def(
      "cp_indexer_topk", &run_cp_indexer_topk, "q"_a, "index_k_cache"_a, "weights"_a, "metadata"_a,
      "block_tables"_a, "page_size"_a, "topk"_a, "prefix_lens"_a, "k_scale"_a, "sorted"_a,
      "num_threads"_a, "out"_a
  );
  module.def(
      "dcp_local_indices", &run_dcp_local_indices, "indices"_a, "dcp_rank"_a, "dcp_size"_a,
      "interleave_size"_a, "out"_a
  );
}

}  // namespace cpattn::bindings
