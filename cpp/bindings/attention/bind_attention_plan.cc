// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/operators.h>

#include <span>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/bound_class.h"
#include "bindings/module.h"
#include "cpattn/attention/attention_plan_state.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Plan = AttentionPlan;

std::string repr(const Plan& plan) {
  const AttentionShape& shape = plan.batch.shape;
  return concat(
      "AttentionPlan(", plan.batch.segments.size(), " segments, ", plan.batch.num_rows, " rows, ",
      plan.items.size(), " items, heads ", shape.num_heads, "/", shape.num_kv_heads, " x ",
      shape.head_dim, "/", shape.v_head_dim, ", ", plan.batch.num_pages, " pages of ",
      plan.batch.page_size, ")"
  );
}

py::array_t<int64_t> items_of(const Plan& plan) {
  py::array_t<int64_t> items({static_cast<py::ssize_t>(plan.items.size()), py::ssize_t{7}});
  auto cells = items.mutable_unchecked<2>();
  for (std::size_t i = 0; i < plan.items.size(); ++i) {
    const AttentionItem& item = plan.items[i];
    const int64_t row[] = {
        item.segment,   item.first_token, item.num_tokens, item.first_head,
        item.num_heads, item.kv_begin,    item.kv_end,
    };
    for (int column = 0; column < 7; ++column) cells(i, column) = row[column];
  }
  return items;
}

/// A hash of the fields in which plans differ as a rule.
int64_t hash_of(const Plan& plan) {
  const AttentionBatch& batch = plan.batch;
  ValueHash hash;
  hash << batch.num_rows << batch.page_size << batch.num_pages;
  for (const AttentionSegment& segment : batch.segments) {
    hash << segment.first_position << segment.left << segment.right;
  }
  hash << batch.shape.num_heads << batch.shape.num_kv_heads << batch.shape.head_dim;
  hash << std::span<const int64_t>(batch.pages.indptr);
  hash << std::span<const int32_t>(batch.pages.page_ids);
  return hash.value();
}

template <class Int>
py::array_t<Int> array_of(const std::vector<Int>& values) {
  return py::array_t<Int>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple python_state(const Plan& plan) {
  const AttentionPlanState state = state_of(plan);
  const AttentionShape& shape = state.shape;
  py::object mask_bits = py::none();
  if (state.has_mask) mask_bits = array_of(state.mask_bits);
  return py::make_tuple(
      py::make_tuple(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.v_head_dim),
      array_of(state.q_lens), array_of(state.kv_lens), array_of(state.page_ids), state.page_size,
      state.num_pages, array_of(state.first_positions), array_of(state.left), array_of(state.right),
      mask_bits, state.batch_invariant, state.num_threads, state.precise, array_of(state.key_ranges)
  );
}
constexpr std::size_t kStateFields = 14;

Plan restore(const py::tuple& fields) {
  constexpr Arguments read("AttentionPlan");
  const std::vector<int64_t> shape = read.ints(fields[0], "shape");
  check(shape.size() == 4, read.name("shape"), " must hold 4 numbers, got ", shape.size());
  AttentionPlanState state{
      .shape =
          {.num_heads = narrow_to_int32(shape[0], "AttentionPlan: num_heads"),
           .num_kv_heads = narrow_to_int32(shape[1], "AttentionPlan: num_kv_heads"),
           .head_dim = narrow_to_int32(shape[2], "AttentionPlan: head_dim"),
           .v_head_dim = narrow_to_int32(shape[3], "AttentionPlan: v_head_dim")},
      .q_lens = read.ints(fields[1], "q_lens"),
      .kv_lens = read.ints(fields[2], "kv_lens"),
      .first_positions = read.ints(fields[6], "first_positions"),
      .left = read.ints(fields[7], "left"),
      .right = read.ints(fields[8], "right"),
      .page_ids = read.ints(fields[3], "page_ids"),
      .page_size = read.integer(fields[4], "page_size"),
      .num_pages = read.integer(fields[5], "num_pages"),
      .has_mask = !fields[9].is_none(),
      .mask_bits = {},
      .key_ranges = read.ints(fields[13], "key_ranges"),
      .batch_invariant = read.flag(fields[10], "batch_invariant"),
      .precise = read.flag(fields[12], "precise"),
      .num_threads = read.integer<int32_t>(fields[11], "num_threads"),
  };
  if (state.has_mask) {
    const TensorArgument bits = read.tensor(fields[9], "mask_bits");
    check(
        bits->dtype == DType::uint8 && bits->rank == 1 && bits->is_contiguous(),
        read.name("mask_bits"), " must be uint8 in one dimension, got ", bits->dtype, " ",
        ShapeOf{*bits}
    );
    state.mask_bits.assign(bits->as<uint8_t>(), bits->as<uint8_t>() + bits->num_elements());
  }
  const GilRelease nogil;
  return plan_of(state);
}

template <class Member>
auto view_of_values(Member member) {
  return [member](const py::object& self) {
    return int_view(std::span(member(self.cast<const Plan&>())), self);
  };
}

}  // namespace

void register_attention_plan(py::module_& module) {
  py::class_<Plan> type(
      module, "AttentionPlan", py::module_local(), R"(Work division of one attention batch.

Made once by plan_attention and reusable for every layer. A value: it can be compared, hashed,
pickled and printed, and its arrays are read-only NumPy views.

Examples
--------
>>> import cpattn
>>> plan = cpattn.plan_attention(
...     q_lens=[3, 1], kv_lens=[10, 4], block_tables=[[2, 0], [1, -1]], page_size=8,
...     num_pages=4, num_heads=2, num_kv_heads=1, head_dim=16)
>>> plan.num_rows, plan.page_ids.tolist(), plan.items.shape[1]
(4, [2, 0, 1], 7))"
  );
  type.def(py::self == py::self);
  type.def("__hash__", &hash_of);
  type.def("__repr__", &repr);
  type.def_property_readonly(
      "num_rows", [](const Plan& p) { return p.batch.num_rows; },
      "Rows of q: the new tokens of all sequences."
  );
  type.def_property_readonly(
      "num_heads", [](const Plan& p) { return p.batch.shape.num_heads; }, "Heads of the queries."
  );
  type.def_property_readonly(
      "num_kv_heads", [](const Plan& p) { return p.batch.shape.num_kv_heads; },
      "Heads of keys and values."
  );
  type.def_property_readonly(
      "head_dim", [](const Plan& p) { return p.batch.shape.head_dim; }, "Elements of a key."
  );
  type.def_property_readonly(
      "v_head_dim", [](const Plan& p) { return p.batch.shape.v_head_dim; }, "Elements of a value."
  );
  type.def_property_readonly(
      "page_size", [](const Plan& p) { return p.batch.page_size; }, "Tokens of a page."
  );
  type.def_property_readonly(
      "num_pages", [](const Plan& p) { return p.batch.num_pages; }, "Pages of the caches."
  );
  type.def_property_readonly(
      "page_indptr",
      view_of_values([](const Plan& p) -> const auto& { return p.batch.pages.indptr; }),
      "int64 [num_sequences + 1]: sequence s owns page_ids[page_indptr[s]:page_indptr[s + 1]]."
  );
  type.def_property_readonly(
      "page_ids",
      view_of_values([](const Plan& p) -> const auto& { return p.batch.pages.page_ids; }),
      "int32: the pages that will be read, sequence by sequence."
  );
  type.def_property_readonly(
      "items", &items_of,
      "int64 [num_items, 7]: segment, first_token, num_tokens, first_head, num_heads, kv_begin, "
      "kv_end."
  );
  type.def_property_readonly(
      "part_keys", [](const Plan& p) { return p.part_keys; },
      "The keys of short sequences are divided at multiples of this."
  );
  type.def_property_readonly(
      "item_costs", view_of_values([](const Plan& p) -> const auto& { return p.item_costs; }),
      "int64 [num_items]: visible (row, key) pairs of each item, with its packing."
  );
  define_state(module, type, &python_state, "restore_attention_plan", kStateFields, &restore);
  copy_by_reference(type);
}

}  // namespace cpattn::bindings
