// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "bindings/context_parallel/rank_rows_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/context_parallel/halo.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

py::tuple halo_of(py::handle metadata, py::handle window, py::handle ratio, py::handle rank) {
  const Arguments read("plan_halo");
  const auto [rows, own] = rank_rows_value(read, metadata, rank);
  const int64_t size = read.integer(window, "window"), step = read.integer(ratio, "ratio");
  HaloPlan plan = plan_halo(rows, own, size, step, read.function());
  return py::make_tuple(
      py::cast(plan.send_counts), py::cast(plan.recv_counts),
      int_array(std::move(plan.send_indices)), int_array(std::move(plan.cached_request)),
      int_array(std::move(plan.cached_position)), int_array(std::move(plan.segment_request)),
      int_array(std::move(plan.halo_lens)), int_array(std::move(plan.extended_indptr)),
      int_array(std::move(plan.extended_indices)), int_array(std::move(plan.unit_request)),
      int_array(std::move(plan.unit_ids)), int_array(std::move(plan.unit_starts)),
      int_array(std::move(plan.unit_lens))
  );
}

py::tuple relayout_of(py::handle source, py::handle target) {
  const Arguments read("plan_relayout");
  const auto& from = read.value<ContextParallelMetadata>(source, "source");
  const auto& to = read.value<ContextParallelMetadata>(target, "target");
  check(
      from.cp_size == to.cp_size && from.cp_rank == to.cp_rank, read.function(),
      ": target must be of rank ", from.cp_rank, " of ", from.cp_size, ", as source, got ",
      to.cp_rank, " of ", to.cp_size
  );
  check(
      std::ranges::equal(from.extend_lens, to.extend_lens) &&
          std::ranges::equal(from.prefix_lens, to.prefix_lens),
      read.function(), ": target must have the lengths and prefixes of source, got others"
  );
  return relayout_fields(plan_relayout(rank_rows(from), rank_rows(to), from.cp_rank));
}

py::tuple pending_of(
    py::handle metadata, py::handle window, py::handle ratio, py::handle keepers, py::handle rank
) {
  const Arguments read("plan_pending");
  const auto [rows, own] = rank_rows_value(read, metadata, rank);
  const int64_t size = read.integer(window, "window"), step = read.integer(ratio, "ratio");
  const auto ranks = read.optional_ints(keepers, "keepers");
  return relayout_fields(plan_pending(rows, own, size, step, ranks, read.function()));
}

}  // namespace

// The GIL stays held: a plan takes microseconds.
void register_halo(py::module_& module) {
  module.def("plan_halo", &halo_of);
  module.def("plan_relayout", &relayout_of);
  module.def("plan_pending", &pending_of);
}

}  // namespace cpattn::bindings
