// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/sparse_flash_attention.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run(
    const py::object& query,
    const py::object& key,
    const py::object& value,
    const py::object& sparse_indices,
    double scale_value,
    const py::object& block_table,
    const py::object& actual_seq_lengths_query,
    const py::object& actual_seq_lengths_kv,
    const py::object& query_rope,
    const py::object& key_rope,
    int64_t sparse_block_size,
    const std::string& layout_query,
    const std::string& layout_kv,
    int64_t sparse_mode,
    int64_t pre_tokens,
    int64_t next_tokens,
    int64_t attention_mode,
    const py::object& out,
    const py::object& softmax_max,
    const py::object& softmax_sum
) {
  const TensorArgument query_view(query, "query"), key_view(key, "key"), value_view(value, "value");
  const TensorArgument indices_view(sparse_indices, "sparse_indices");
  const TensorArgument out_view = output_argument(out, "out");
  std::optional<TensorArgument> query_rope_view, key_rope_view, max_view, sum_view;
  std::optional<IndexTableArgument> table;
  const auto optional = [](std::optional<TensorArgument>& view, const py::object& object,
                           const char* name) -> std::optional<TensorView> {
    if (object.is_none()) return std::nullopt;
    return *view.emplace(object, name);
  };
  SparseFlashArguments arguments{
      .query = *query_view,
      .key = *key_view,
      .value = *value_view,
      .sparse_indices = *indices_view,
      .scale_value = scale_value,
      .actual_seq_lengths_query = optional_index_list(
          actual_seq_lengths_query, "npu_sparse_flash_attention: actual_seq_lengths_query"
      ),
      .actual_seq_lengths_kv = optional_index_list(
          actual_seq_lengths_kv, "npu_sparse_flash_attention: actual_seq_lengths_kv"
      ),
      .query_rope = optional(query_rope_view, query_rope, "query_rope"),
      .key_rope = optional(key_rope_view, key_rope, "key_rope"),
      .sparse_block_size = sparse_block_size,
      .layout_query = layout_query,
      .layout_kv = layout_kv,
      .sparse_mode = sparse_mode,
      .pre_tokens = pre_tokens,
      .next_tokens = next_tokens,
      .attention_mode = attention_mode,
      .out = *out_view,
      .softmax_max = optional(max_view, softmax_max, "softmax_max"),
      .softmax_sum = optional(sum_view, softmax_sum, "softmax_sum"),
  };
  if (!block_table.is_none()) {
    arguments.block_table = *table.emplace(block_table, "npu_sparse_flash_attention: block_table");
  }
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
