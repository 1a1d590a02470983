// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/kv/page_rows.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run_write_page_rows(
    py::handle slots,
    py::handle k,
    py::handle k_pages,
    py::handle k_scale,
    py::handle v,
    py::handle v_pages,
    py::handle v_scale
) {
  const Arguments read("write_page_rows");
  auto slot_list = read.ints(slots, "slots");
  const TensorArgument k_view = read.tensor(k, "k"), v_view = read.tensor(v, "v");
  const TensorArgument k_out = read.output(k_pages, "k_pages");
  const TensorArgument v_out = read.output(v_pages, "v_pages");
  const PageRows parts[] = {
      {.name = "k", .rows = *k_view, .pages = *k_out, .scale = read.real(k_scale, "k_scale")},
      {.name = "v", .rows = *v_view, .pages = *v_out, .scale = read.real(v_scale, "v_scale")},
  };
  const Computation computation;
  write_page_rows(read.function(), slot_list, parts);
}

/// Rows [num_rows, 1, width] of one kind, and pages of one token [num_slots, 1, 1, width].
void run_write_slot_rows(py::handle slots, py::handle rows, py::handle pages) {
  const Arguments read("write_slot_rows");
  auto slot_list = read.ints(slots, "slots");
  const TensorArgument view = read.tensor(rows, "rows"), out = read.output(pages, "pages");
  const PageRows part{.name = "rows", .rows = *view, .pages = *out};
  const Computation computation;
  write_page_rows(read.function(), slot_list, {&part, 1});
}

}  // namespace

void register_page_rows(py::module_& module) {
  module.def(
      "write_page_rows", &run_write_page_rows, "slots"_a, "k"_a, "k_pages"_a, "k_scale"_a, "v"_a,
      "v_pages"_a, "v_scale"_a
  );
  module.def("write_slot_rows", &run_write_slot_rows, "slots"_a, "rows"_a, "pages"_a);
}

}  // namespace cpattn::bindings
