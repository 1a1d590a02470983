// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/npu/lightning_indexer.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

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

}  // namespace

void register_lightning_indexer(py::module_& module) {
  module.def(
      "npu_lightning_indexer", &run_lightning_indexer, "query"_a, "key"_a, "weights"_a,
      "actual_seq_lengths_query"_a, "actual_seq_lengths_key"_a, "block_table"_a, "layout_query"_a,
      "layout_key"_a, "sparse_count"_a, "sparse_mode"_a, "pre_tokens"_a, "next_tokens"_a,
      "indices"_a, "values"_a
  );
}

}  // namespace cpattn::bindings
