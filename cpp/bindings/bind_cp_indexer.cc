// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments.h"
#include "bindings/module.h"
#include "cpattn/cp_indexer.h"
#include "cpattn/dcp_local_indices.h"
#include "cpattn/lightning_indexer.h"

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

void run_lightning_indexer(
    py::handle query,
    py::handle key,
    py::handle weights,
    py::handle actual_seq_lengths_query,
    py::handle actual_seq_lengths_key,
    py::handle block_table,
    py::handle layout_query,
    py::handle layout_key,
    py::handle sparse_count,
    py::handle sparse_mode,
    py::handle pre_tokens,
    py::handle next_tokens,
    py::handle indices,
    py::handle values
) {
  const Arguments read("npu_lightning_indexer");
  const TensorArgument queries = read.tensor(query, "query");
  const TensorArgument keys = read.tensor(key, "key");
  const TensorArgument head_weights = read.tensor(weights, "weights");
  const auto table = read.optional_table(block_table, "block_table");
  const TensorArgument output = read.output(indices, "indices");
  const auto scores = read.optional_output(values, "values");
  const LightningIndexerArguments arguments{
      .query = *queries,
      .key = *keys,
      .weights = *head_weights,
      .actual_seq_lengths_query =
          read.optional_ints(actual_seq_lengths_query, "actual_seq_lengths_query"),
      .actual_seq_lengths_key =
          read.optional_ints(actual_seq_lengths_key, "actual_seq_lengths_key"),
      .block_table = view_of(table),
      .layout_query = read.text(layout_query, "layout_query"),
      .layout_key = read.text(layout_key, "layout_key"),
      .sparse_count = read.integer(sparse_count, "sparse_count"),
      .sparse_mode = read.integer(sparse_mode, "sparse_mode"),
      .pre_tokens = read.integer(pre_tokens, "pre_tokens"),
      .next_tokens = read.integer(next_tokens, "next_tokens"),
      .indices = *output,
      .values = view_of(scores),
  };
  const Computation computation;
  npu_lightning_indexer(arguments);
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
      "npu_lightning_indexer", &run_lightning_indexer, "query"_a, "key"_a, "weights"_a,
      "actual_seq_lengths_query"_a, "actual_seq_lengths_key"_a, "block_table"_a, "layout_query"_a,
      "layout_key"_a, "sparse_count"_a, "sparse_mode"_a, "pre_tokens"_a, "next_tokens"_a,
      "indices"_a, "values"_a
  );
  module.def(
      "dcp_local_indices", &run_dcp_local_indices, "indices"_a, "dcp_rank"_a, "dcp_size"_a,
      "interleave_size"_a, "out"_a
  );
}

}  // namespace cpattn::bindings
