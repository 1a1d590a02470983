// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/context_parallel/rank_rows_argument.h"
#include "bindings/module.h"
#include "cpattn/kv/units.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

py::tuple units_of(
    py::handle metadata,
    py::handle ratio,
    py::handle block_tables,
    py::handle page_size,
    const Interleave* placement,
    bool of_slots,
    py::handle rank
) {
  const Arguments read("plan_units");
  const auto [rows, own] = rank_rows_value(read, metadata, rank);
  const int64_t step = read.integer(ratio, "ratio");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  using Sharing = UnitPools::Sharing;
  UnitPools pools{.block_tables = *tables, .page_size = read.integer(page_size, "page_size")};
  if (placement != nullptr) {
    pools.sharing = of_slots ? Sharing::slots : Sharing::units;
    pools.placement = *placement;
  }
  return relayout_fields(plan_units(rows, own, step, pools, read.function()));
}

}  // namespace

// The GIL stays held: a plan takes microseconds.
void register_units(py::module_& module) { module.def("plan_units", &units_of); }

}  // namespace cpattn::bindings
