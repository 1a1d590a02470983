// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/npu/sparse_flash_attention.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run(
    py::handle query,
    py::handle key,
    py::handle value,
    py::handle sparse_indices,
    py::handle scale_value,
    py::handle block_table,
    py::handle actual_seq_lengths_query,
    py::handle actual_seq_lengths_kv,
    py::handle query_rope,
    py::handle key_rope,
    py::handle sparse_block_size,
    py::handle layout_query,
    py::handle layout_kv,
    py::handle sparse_mode,
    py::handle pre_tokens,
    py::handle next_tokens,
    py::handle attention_mode,
    py::handle out,
    py::handle softmax_max,
    py::handle softmax_sum
) {
  const Arguments read("npu_sparse_flash_attention");
  const TensorArgument query_view = read.tensor(query, "query");
  const TensorArgument key_view = read.tensor(key, "key");
  const TensorArgument value_view = read.tensor(value, "value");
  const TensorArgument indices_view = read.tensor(sparse_indices, "sparse_indices");
  const auto table = read.optional_table(block_table, "block_table");
  const auto query_rope_view = read.optional_tensor(query_rope, "query_rope");
  const auto key_rope_view = read.optional_tensor(key_rope, "key_rope");
  const TensorArgument out_view = read.output(out, "out");
  const auto max_view = read.optional_output(softmax_max, "softmax_max");
  const auto sum_view = read.optional_output(softmax_sum, "softmax_sum");
  const SparseFlashArguments arguments{
      .query = *query_view,
      .key = *key_view,
      .value = *value_view,
      .sparse_indices = *indices_view,
      .scale_value = read.real(scale_value, "scale_value"),
      .block_table = view_of(table),
      .actual_seq_lengths_query =
          read.optional_ints(actual_seq_lengths_query, "actual_seq_lengths_query"),
      .actual_seq_lengths_kv = read.optional_ints(actual_seq_lengths_kv, "actual_seq_lengths_kv"),
      .query_rope = view_of(query_rope_view),
      .key_rope = view_of(key_rope_view),
      .sparse_block_size = read.integer(sparse_block_size, "sparse_block_size"),
      .layout_query = read.text(layout_query, "layout_query"),
      .layout_kv = read.text(layout_kv, "layout_kv"),
      .sparse_mode = read.integer(sparse_mode, "sparse_mode"),
      .pre_tokens = read.integer(pre_tokens, "pre_tokens"),
      .next_tokens = read.integer(next_tokens, "next_tokens"),
      .attention_mode = read.integer(attention_mode, "attention_mode"),
      .out = *out_view,
      .softmax_max = view_of(max_view),
      .softmax_sum = view_of(sum_view),
  };
  const Computation computation;
  npu_sparse_flash_attention(arguments);
}

}  // namespace

void register_sparse_flash(py::module_& module) {
  module.def(
      "npu_sparse_flash_attention", &run, "query"_a, "key"_a, "value"_a, "sparse_indices"_a,
      "scale_value"_a, "block_table"_a, "actual_seq_lengths_query"_a, "actual_seq_lengths_kv"_a,
      "query_rope"_a, "key_rope"_a, "sparse_block_size"_a, "layout_query"_a, "layout_kv"_a,
      "sparse_mode"_a, "pre_tokens"_a, "next_tokens"_a, "attention_mode"_a, "out"_a,
      "softmax_max"_a, "softmax_sum"_a
  );
}

}  // namespace cpattn::bindings
