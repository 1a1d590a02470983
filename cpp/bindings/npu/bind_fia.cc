// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/npu/fia.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

constexpr Arguments kRead("npu_fused_infer_attention_score");

/// A checked call between the two steps of Python: allocate, then run. Keeps
/// the tensors alive that the plan has views of.
class Fia {
 public:
  Fia(const py::object& query,
      const py::object& key,
      const py::object& value,
      const py::object& query_rope,
      const py::object& key_rope,
      py::handle atten_mask,
      py::handle actual_seq_lengths,
      py::handle actual_seq_lengths_kv,
      py::handle block_table,
      py::handle num_heads,
      py::handle num_key_value_heads,
      py::handle scale,
      py::handle pre_tokens,
      py::handle next_tokens,
      py::handle input_layout,
      py::handle sparse_mode,
      py::handle inner_precise,
      py::handle block_size,
      py::handle softmax_lse_flag,
      const py::object& antiquant_scale,
      const py::object& antiquant_offset,
      const py::object& key_antiquant_scale,
      const py::object& key_antiquant_offset,
      const py::object& value_antiquant_scale,
      const py::object& value_antiquant_offset,
      py::handle antiquant_mode,
      py::handle key_antiquant_mode,
      py::handle value_antiquant_mode)
      : query_(kRead.tensor(query, "query")),
        key_(kRead.tensor(key, "key")),
        value_(kRead.tensor(value, "value")),
        query_rope_(kRead.optional_tensor(query_rope, "query_rope")),
        key_rope_(kRead.optional_tensor(key_rope, "key_rope")),
        antiquant_scale_(kRead.optional_tensor(antiquant_scale, "antiquant_scale")),
        antiquant_offset_(kRead.optional_tensor(antiquant_offset, "antiquant_offset")),
        key_antiquant_scale_(kRead.optional_tensor(key_antiquant_scale, "key_antiquant_scale")),
        key_antiquant_offset_(kRead.optional_tensor(key_antiquant_offset, "key_antiquant_offset")),
        value_antiquant_scale_(
            kRead.optional_tensor(value_antiquant_scale, "value_antiquant_scale")
        ),
        value_antiquant_offset_(
            kRead.optional_tensor(value_antiquant_offset, "value_antiquant_offset")
        ),
        owners_(
            py::make_tuple(
                query,
                key,
                value,
                query_rope,
                key_rope,
                antiquant_scale,
                antiquant_offset,
                key_antiquant_scale,
                key_antiquant_offset,
                value_antiquant_scale,
                value_antiquant_offset
            )
        ) {
    const auto mask = kRead.optional_tensor(atten_mask, "atten_mask");
    const auto table = kRead.optional_table(block_table, "block_table");
    const FiaArguments arguments{
        .query = *query_,
        .key = *key_,
        .value = *value_,
        .query_rope = view_of(query_rope_),
        .key_rope = view_of(key_rope_),
        .atten_mask = view_of(mask),
        .actual_seq_lengths = kRead.optional_ints(actual_seq_lengths, "actual_seq_lengths"),
        .actual_seq_lengths_kv =
            kRead.optional_ints(actual_seq_lengths_kv, "actual_seq_lengths_kv"),
        .block_table = view_of(table),
        .num_heads = kRead.integer(num_heads, "num_heads"),
        .num_key_value_heads = kRead.integer(num_key_value_heads, "num_key_value_heads"),
        .scale = kRead.real(scale, "scale"),
        .pre_tokens = kRead.integer(pre_tokens, "pre_tokens"),
        .next_tokens = kRead.integer(next_tokens, "next_tokens"),
        .input_layout = kRead.text(input_layout, "input_layout"),
        .sparse_mode = kRead.integer(sparse_mode, "sparse_mode"),
        .inner_precise = kRead.integer(inner_precise, "inner_precise"),
        .block_size = kRead.integer(block_size, "block_size"),
        .antiquant =
            {.mode = kRead.integer(antiquant_mode, "antiquant_mode"),
             .scale = view_of(antiquant_scale_),
             .offset = view_of(antiquant_offset_)},
        .key_antiquant =
            {.mode = kRead.integer(key_antiquant_mode, "key_antiquant_mode"),
             .scale = view_of(key_antiquant_scale_),
             .offset = view_of(key_antiquant_offset_)},
        .value_antiquant =
            {.mode = kRead.integer(value_antiquant_mode, "value_antiquant_mode"),
             .scale = view_of(value_antiquant_scale_),
             .offset = view_of(value_antiquant_offset_)},
        .softmax_lse_flag = kRead.flag(softmax_lse_flag, "softmax_lse_flag"),
    };
    const GilRelease nogil;
    plan_ = plan_fia(arguments);
  }

  py::tuple out_shape() const { return py::cast(plan_.out_shape); }
  py::tuple lse_shape() const { return py::cast(plan_.lse_shape); }

  void run(py::handle out, py::handle lse) const {
    const TensorArgument out_view = kRead.output(out, "out");
    const TensorArgument lse_view = kRead.output(lse, "lse");
    const Computation computation;
    run_fia(plan_, *out_view, *lse_view);
  }

 private:
  TensorArgument query_, key_, value_;
  std::optional<TensorArgument> query_rope_, key_rope_;
  std::optional<TensorArgument> antiquant_scale_, antiquant_offset_, key_antiquant_scale_,
      key_antiquant_offset_, value_antiquant_scale_, value_antiquant_offset_;
  py::tuple owners_;
  FiaPlan plan_;
};

}  // namespace

void register_fia(py::module_& module) {
  py::class_<Fia> type(module, "Fia", py::module_local());
  type.def(
      py::init<
          const py::object&, const py::object&, const py::object&, const py::object&,
          const py::object&, py::handle, py::handle, py::handle, py::handle, py::handle, py::handle,
          py::handle, py::handle, py::handle, py::handle, py::handle, py::handle, py::handle,
          py::handle, const py::object&, const py::object&, const py::object&, const py::object&,
          const py::object&, const py::object&, py::handle, py::handle, py::handle>(),
      "query"_a, "key"_a, "value"_a, py::kw_only(), "query_rope"_a, "key_rope"_a, "atten_mask"_a,
      "actual_seq_lengths"_a, "actual_seq_lengths_kv"_a, "block_table"_a, "num_heads"_a,
      "num_key_value_heads"_a, "scale"_a, "pre_tokens"_a, "next_tokens"_a, "input_layout"_a,
      "sparse_mode"_a, "inner_precise"_a, "block_size"_a, "softmax_lse_flag"_a, "antiquant_scale"_a,
      "antiquant_offset"_a, "key_antiquant_scale"_a, "key_antiquant_offset"_a,
      "value_antiquant_scale"_a, "value_antiquant_offset"_a, "antiquant_mode"_a,
      "key_antiquant_mode"_a, "value_antiquant_mode"_a
  );
  type.def_property_readonly("out_shape", &Fia::out_shape);
  type.def_property_readonly("lse_shape", &Fia::lse_shape);
  type.def("run", &Fia::run, "out"_a, "lse"_a);
}

}  // namespace cpattn::bindings
