// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/check.h"
#include "cpattn/fia.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

constexpr char kFunction[] = "npu_fused_infer_attention_score";

/// A checked call between the two steps of Python: allocate, then run. Keeps
/// the tensors alive that the plan has views of.
class Fia {
 public:
  Fia(const py::object& query,
      const py::object& key,
      const py::object& value,
      const py::object& query_rope,
      const py::object& key_rope,
      const py::object& atten_mask,
      const py::object& actual_seq_lengths,
      const py::object& actual_seq_lengths_kv,
      const py::object& block_table,
      int64_t num_heads,
      int64_t num_key_value_heads,
      double scale,
      int64_t pre_tokens,
      int64_t next_tokens,
      const std::string& input_layout,
      int64_t sparse_mode,
      int64_t inner_precise,
      int64_t block_size,
      bool softmax_lse_flag)
      : query_(query, "query"),
        key_(key, "key"),
        value_(value, "value"),
        owners_(py::make_tuple(query, key, value, query_rope, key_rope)) {
    std::optional<TensorArgument> mask;
    std::optional<IndexTableArgument> table;
    FiaArguments arguments{
        .query = *query_,
        .key = *key_,
        .value = *value_,
        .query_rope = optional(query_rope_, query_rope, "query_rope"),
        .key_rope = optional(key_rope_, key_rope, "key_rope"),
        .atten_mask = optional(mask, atten_mask, "atten_mask"),
        .actual_seq_lengths = lengths("actual_seq_lengths", actual_seq_lengths),
        .actual_seq_lengths_kv = lengths("actual_seq_lengths_kv", actual_seq_lengths_kv),
        .num_heads = num_heads,
        .num_key_value_heads = num_key_value_heads,
        .scale = scale,
        .pre_tokens = pre_tokens,
        .next_tokens = next_tokens,
        .input_layout = input_layout,
        .sparse_mode = sparse_mode,
        .inner_precise = inner_precise,
        .block_size = block_size,
        .softmax_lse_flag = softmax_lse_flag,
    };
    if (!block_table.is_none()) {
      table.emplace(block_table, concat(kFunction, ": block_table").c_str());
      arguments.block_table = **table;
    }
    const py::gil_scoped_release nogil;
    plan_ = plan_fia(arguments);
  }

  py::tuple out_shape() const { return py::cast(plan_.out_shape); }
  py::tuple lse_shape() const { return py::cast(plan_.lse_shape); }

  void run(const py::object& out, const py::object& lse) const {
    const TensorArgument out_view = output_argument(out, "out");
    const TensorArgument lse_view = output_argument(lse, "lse");
    const Computation computation;
    run_fia(plan_, *out_view, *lse_view);
  }

 private:
  static std::optional<TensorView> optional(
      std::optional<TensorArgument>& argument, const py::object& object, const char* name
  ) {
    if (object.is_none()) return std::nullopt;
    argument.emplace(object, name);
    return **argument;
  }

  static std::optional<std::vector<int64_t>> lengths(const char* name, const py::object& object) {
    return optional_index_list(object, concat(kFunction, ": ", name).c_str());
  }

  TensorArgument query_, key_, value_;
  std::optional<TensorArgument> query_rope_, key_rope_;
  py::tuple owners_;
  FiaPlan plan_;
};

}  // namespace

void register_fia(py::module_& module) {
  py::class_<Fia>(module, "Fia")
      .def(
          py::init<
              const py::object&, const py::object&, const py::object&, const py::object&,
              const py::object&, const py::object&, const py::object&, const py::object&,
              const py::object&, int64_t, int64_t, double, int64_t, int64_t, const std::string&,
              int64_t, int64_t, int64_t, bool>(),
          "query"_a, "key"_a, "value"_a, py::kw_only(), "query_rope"_a, "key_rope"_a,
          "atten_mask"_a, "actual_seq_lengths"_a, "actual_seq_lengths_kv"_a, "block_table"_a,
          "num_heads"_a, "num_key_value_heads"_a, "scale"_a, "pre_tokens"_a, "next_tokens"_a,
          "input_layout"_a, "sparse_mode"_a, "inner_precise"_a, "block_size"_a, "softmax_lse_flag"_a
      )
      .def_property_readonly("out_shape", &Fia::out_shape)
      .def_property_readonly("lse_shape", &Fia::lse_shape)
      .def("run", &Fia::run, "out"_a, "lse"_a);
}

}  // namespace cpattn::bindings
