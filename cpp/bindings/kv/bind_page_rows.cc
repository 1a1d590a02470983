// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/kv/move_rows.h"
#include "cpattn/kv/page_rows.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_write_pages(
    py::handle slots,
    py::handle k,
    py::handle k_pages,
    py::handle v,
    py::handle v_pages,
    py::handle kv_layout,
    py::handle k_scale,
    py::handle v_scale
) {
  const Arguments read("write_pages");
  auto slot_list = read.ints(slots, "slots");
  const TensorArgument k_view = read.tensor(k, "k"), v_view = read.tensor(v, "v");
  const TensorArgument k_out = read.output(k_pages, "k_pages");
  const TensorArgument v_out = read.output(v_pages, "v_pages");
  const KVAxisOrder order = read.kv_layout(kv_layout);
  const PageRows parts[] = {
      {.name = "k",
       .pages_name = "k_pages",
       .scale_name = "k_scale",
       .rows = *k_view,
       .pages = heads_first(*k_out, order),
       .scale = read.real(k_scale, "k_scale")},
      {.name = "v",
       .pages_name = "v_pages",
       .scale_name = "v_scale",
       .rows = *v_view,
       .pages = heads_first(*v_out, order),
       .scale = read.real(v_scale, "v_scale")},
  };
  const Computation computation;
  write_page_rows(read.function(), slot_list, parts);
}

/// Rows [num_rows, num_heads, width] of several kinds, each with its pool [num_slots, num_heads,
/// width].
void run_write_slot_rows(py::handle slots, py::handle rows, py::handle pools) {
  const Arguments read("write_slot_rows");
  auto slot_list = read.ints(slots, "slots");
  const TensorListArgument from(read, rows, "rows");
  const TensorListArgument to(read, pools, "pools", /*are_written=*/true);
  check(from.views().size() == to.views().size(), read.function(), ": each of rows needs a pool");
  std::vector<PageRows> parts;
  for (std::size_t i = 0; i < to.views().size(); ++i) {
    parts.push_back({
        .name = "rows",
        .pages_name = "pools",
        .rows = from.views()[i],
        .pages = heads_first(to.views()[i], KVAxisOrder::nhd),
    });
  }
  const Computation computation;
  write_page_rows(read.function(), slot_list, parts);
}

void run_move_rows(
    py::handle sources, py::handle targets, py::handle caches, py::handle kv_layout
) {
  const Arguments read("move_rows");
  const auto from = read.ints(sources, "sources"), to = read.ints(targets, "targets");
  const TensorListArgument given(read, caches, "caches", /*are_written=*/true);
  const KVAxisOrder order = read.kv_layout(kv_layout);
  std::vector<TensorView> pages;
  for (const TensorView& cache : given.views()) pages.push_back(heads_first(cache, order));
  const Computation computation;
  move_page_rows(read.function(), from, to, pages);
}

}  // namespace

void register_page_rows(py::module_& module) {
  module.def(
      "write_pages", &run_write_pages, "slots"_a, "k"_a, "k_pages"_a, "v"_a, "v_pages"_a,
      "kv_layout"_a, "k_scale"_a, "v_scale"_a
  );
  module.def("move_rows", &run_move_rows, "sources"_a, "targets"_a, "caches"_a, "kv_layout"_a);
  module.def("write_slot_rows", &run_write_slot_rows, "slots"_a, "rows"_a, "pools"_a);
}

}  // namespace cpattn::bindings
