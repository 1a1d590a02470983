// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/num_threads.h"
#include "bindings/tensor_argument.h"
#include "cpattn/cp_indexer.h"
#include "cpattn/dcp_local_indices.h"
#include "cpattn/lightning_indexer.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_cp_indexer_topk(
    const py::object& q,
    const py::object& index_k_cache,
    const py::object& weights,
    const ContextParallelMetadata& metadata,
    const py::object& block_tables,
    int64_t page_size,
    int64_t topk,
    const py::object& prefix_lens,
    const py::object& k_scale,
    bool sorted,
    std::optional<int> num_threads,
    const py::object& out
) {
  const TensorArgument queries(q, "q"), keys(index_k_cache, "index_k_cache");
  const TensorArgument head_weights(weights, "weights");
  const IndexTableArgument tables(block_tables, "cp_indexer_topk: block_tables");
  const TensorArgument output = output_argument(out, "out");
  std::optional<TensorArgument> scales;
  CpIndexerArguments arguments{
      .q = *queries,
      .weights = *head_weights,
      .index_k_cache = *keys,
      .block_tables = *tables,
      .page_size = page_size,
      .topk = topk,
      .prefix_lens = optional_index_list(prefix_lens, "cp_indexer_topk: prefix_lens"),
      .sorted = sorted,
      .num_threads = parse_threads("cp_indexer_topk", num_threads),
      .indices = *output,
  };
  if (!k_scale.is_none()) arguments.k_scale = *scales.emplace(k_scale, "k_scale");
  const Computation computation;
  cp_indexer_topk(metadata, arguments);
}

void run_lightning_indexer(
    const py::object& query,
    const py::object& key,
    const py::object& weights,
    const py::object& actual_seq_lengths_query,
    const py::object& actual_seq_lengths_key,
    const py::object& block_table,
    const std::string& layout_query,
    const std::string& layout_key,
    int64_t sparse_count,
    int64_t sparse_mode,
    int64_t pre_tokens,
    int64_t next_tokens,
    const py::object& indices,
    const py::object& values
) {
  const TensorArgument queries(query, "query"), keys(key, "key"), head_weights(weights, "weights");
  const TensorArgument output = output_argument(indices, "indices");
  std::optional<IndexTableArgument> table;
  std::optional<TensorArgument> scores;
  LightningIndexerArguments arguments{
      .query = *queries,
      .key = *keys,
      .weights = *head_weights,
      .actual_seq_lengths_query = optional_index_list(
          actual_seq_lengths_query, "npu_lightning_indexer: actual_seq_lengths_query"
      ),
      .actual_seq_lengths_key = optional_index_list(
          actual_seq_lengths_key, "npu_lightning_indexer: actual_seq_lengths_key"
      ),
      .layout_query = layout_query,
      .layout_key = layout_key,
      .sparse_count = sparse_count,
      .sparse_mode = sparse_mode,
      .pre_tokens = pre_tokens,
      .next_tokens = next_tokens,
      .indices = *output,
  };
  if (!block_table.is_none()) {
    arguments.block_table = *table.emplace(block_table, "npu_lightning_indexer: block_table");
  }
  if (!values.is_none()) arguments.values = *scores.emplace(output_argument(values, "values"));
  const Computation computation;
  npu_lightning_indexer(arguments);
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
      "dcp_local_indices",
      [](const py::object& indices, int64_t dcp_rank, int64_t dcp_size, int64_t interleave_size,
         const py::object& out) {
        const TensorArgument global(indices, "indices");
        const TensorArgument local = output_argument(out, "out");
        const Computation computation;
        dcp_local_indices(*global, dcp_rank, dcp_size, interleave_size, *local);
      },
      "indices"_a, "dcp_rank"_a, "dcp_size"_a, "interleave_size"_a, "out"_a
  );
}

}  // namespace cpattn::bindings
