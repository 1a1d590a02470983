// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/bound_class.h"
#include "bindings/module.h"
#include "cpattn/kv/shard_gather.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Plan = ShardGatherPlan;

constexpr BoundMember<Plan, Plan::Ints> kPages[] = {
    {"prefix_pages", &Plan::prefix_pages,
     "int32 array: pages of the pool that are gathered, by rank, ascending on each."},
    {"chunk_pages", &Plan::chunk_pages,
     "int32 array: pages of new tokens, in the order in which they stand behind chunk_page."},
    {"page_pos", &Plan::page_pos,
     "int32 array [pages]: page of the scratch of each page of the pool, or trash_page."},
};

struct SizeField {
  const char* name;
  int64_t (*value)(const Plan&);
  const char* doc;
};
constexpr SizeField kSizes[] = {
    {"shard_size", [](const Plan& plan) { return plan.scratch.placement.shard_size; },
     "Ranks that share the pool."},
    {"page_size", [](const Plan& plan) { return plan.scratch.page_size(); }, "Tokens of a page."},
    {"size", [](const Plan& plan) { return plan.scratch.size; },
     "Slots of each rank, without those of its reserved page."},
    {"max_prefix_tokens", [](const Plan& plan) { return plan.scratch.max_prefix_tokens; },
     "Tokens of the first part of the scratch."},
    {"chunk_tokens", [](const Plan& plan) { return plan.scratch.chunk_tokens; },
     "Tokens of the second part of the scratch."},
    {"block_pages", [](const Plan& plan) { return plan.block_pages; },
     "Pages that each rank sends; 0 if nothing is gathered."},
    {"chunk_page", [](const Plan& plan) { return plan.scratch.chunk_page(); },
     "The first page of new tokens in the scratch."},
    {"trash_page", [](const Plan& plan) { return plan.scratch.trash_page(); },
     "The last page of the scratch, of all that has no place in it."},
};

py::array view(const py::object& self, const Plan::Ints& values) {
  return int_view(std::span<const int32_t>(values), self);
}

py::object send_pages(const py::object& self) {
  const auto& plan = self.cast<const Plan&>();
  return view(self, plan.send_pages)
      .attr("reshape")(plan.scratch.placement.shard_size, plan.block_pages);
}

Plan build(
    py::handle req_to_token,
    py::handle req_pool_indices,
    py::handle prefix_lens,
    py::handle seq_lens,
    const Interleave& placement,
    py::handle size,
    py::handle max_prefix_tokens,
    py::handle chunk_tokens
) {
  const Arguments read("plan_shard_gather");
  const auto rows = read.optional_ints(req_pool_indices, "req_pool_indices");
  const std::vector<int64_t> prefixes = read.ints(prefix_lens, "prefix_lens");
  const std::vector<int64_t> lens = read.ints(seq_lens, "seq_lens");
  const ShardScratch scratch{
      .placement = placement,
      .size = read.integer(size, "size"),
      .max_prefix_tokens = read.integer(max_prefix_tokens, "max_prefix_tokens"),
      .chunk_tokens = read.integer(chunk_tokens, "chunk_tokens"),
  };
  const IndexTableArgument table = read.table(req_to_token, "req_to_token");
  return plan_shard_gather(
      scratch, {
                   .req_to_token = *table,
                   .req_pool_indices = rows,
                   .prefix_lens = prefixes,
                   .seq_lens = lens,
               }
  );
}

py::array translate(const Plan& self, py::handle slots) {
  const Arguments read("ShardGatherPlan.translate");
  const std::vector<int64_t> values = read.ints(slots, "slots");
  py::array_t<int64_t> rows(static_cast<py::ssize_t>(values.size()));
  translate_slots(self, values, {rows.mutable_data(), values.size()});
  return rows;
}

py::tuple write_plan(const Plan& self, py::handle slots, py::handle rank) {
  const Arguments read("ShardGatherPlan.write_plan");
  const std::vector<int64_t> values = read.ints(slots, "slots");
  LocalShare share = plan_shard_write(self, values, read.integer(rank, "rank"));
  return py::make_tuple(own_array(std::move(share.positions)), own_array(std::move(share.local)));
}

py::dict to_dict(const py::object& self) {
  const auto& plan = self.cast<const Plan&>();
  py::dict out;
  for (const SizeField& field : kSizes) out[field.name] = field.value(plan);
  for (const auto& field : kPages) out[field.name] = int_list(plan.*field.member);
  out["send_pages"] = send_pages(self).attr("tolist")();
  return out;
}

std::string repr(const Plan& plan) {
  return concat(
      "ShardGatherPlan(shard_size=", plan.scratch.placement.shard_size,
      ", page_size=", plan.scratch.page_size(), ", block_pages=", plan.block_pages, ", ",
      plan.prefix_pages.size(), " prefix pages, ", plan.chunk_pages.size(), " chunk pages)"
  );
}

int64_t hash_of(const Plan& plan) {
  ValueHash hash;
  hash << plan.scratch.placement.shard_size << plan.scratch.page_size() << plan.block_pages;
  hash << std::span<const int32_t>(plan.prefix_pages) << std::span<const int32_t>(plan.chunk_pages);
  return hash.value();
}

py::tuple python_state(const Plan& plan) {
  const ShardScratch& scratch = plan.scratch;
  return py::make_tuple(
      scratch.placement.shard_size, scratch.page_size(), scratch.size, scratch.max_prefix_tokens,
      scratch.chunk_tokens, plan.block_pages, int_list(plan.prefix_pages),
      int_list(plan.chunk_pages)
  );
}
constexpr std::size_t kStateFields = 8;

Plan restore(const py::tuple& fields) {
  constexpr Arguments read("ShardGatherPlan");
  const ShardScratch scratch{
      .placement =
          {.shard_size = read.integer(fields[0], "shard_size"),
           .run_len = read.integer(fields[1], "page_size")},
      .size = read.integer(fields[2], "size"),
      .max_prefix_tokens = read.integer(fields[3], "max_prefix_tokens"),
      .chunk_tokens = read.integer(fields[4], "chunk_tokens"),
  };
  const std::vector<int64_t> prefix_pages = read.ints(fields[6], "prefix_pages");
  const std::vector<int64_t> chunk_pages = read.ints(fields[7], "chunk_pages");
  return restore_shard_gather(
      scratch, read.integer(fields[5], "block_pages"), prefix_pages, chunk_pages
  );
}

}  // namespace

// The GIL stays held: a plan takes microseconds.
void register_shard_gather(py::module_& module) {
  py::class_<Plan> type(
      module, "ShardGatherPlan", py::module_local(),
      "Where the keys and values of a batch stand in the scratch of a layer; made by "
      "plan_shard_gather. A value: it can be compared, hashed, pickled and printed."
  );
  for (const SizeField& field : kSizes) {
    type.def_property_readonly(field.name, field.value, field.doc);
  }
  for (const auto& field : kPages) {
    const auto get = [values = field.member](const py::object& self) {
      return view(self, self.cast<const Plan&>().*values);
    };
    type.def_property_readonly(field.name, get, field.doc);
  }
  type.def_property_readonly(
      "send_pages", &send_pages,
      "int32 array [shard_size, block_pages]: local pages that each rank sends, padded with its "
      "page 0."
  );
  type.def(
      "translate", &translate, py::arg("slots"),
      "Rows of the scratch for slots of the pool: int64 array. -1 stays -1, and slots of pages "
      "that "
      "are not in the plan have rows of the trash page."
  );
  type.def(
      "write_plan", &write_plan, py::arg("slots"), py::arg("rank"),
      "What a rank writes of new rows for these slots: where its slots stand among them, and their "
      "rows in its pool, each an int64 array."
  );
  type.def("to_dict", &to_dict, "Every field by name, as plain int or list of int.");
  type.def("__repr__", &repr);
  type.def(py::self == py::self);
  type.def("__hash__", &hash_of);
  define_state(module, type, &python_state, "restore_shard_gather_plan", kStateFields, &restore);
  copy_by_reference(type);
  module.def("plan_shard_gather", &build);
}

}  // namespace cpattn::bindings
