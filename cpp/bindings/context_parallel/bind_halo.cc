// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/context_parallel/halo.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// The rows of all ranks, and the rank that is meant: metadata has one, a layout needs it said.
std::pair<RankRows, int64_t> rows_of(const Arguments& read, py::handle rows, py::handle rank) {
  const std::optional<int64_t> said = read.optional_integer(rank, "rank");
  if (!py::isinstance<PcpLayout>(rows)) {
    const auto& metadata = read.value<ContextParallelMetadata>(rows, "metadata");
    check(
        !said || *said == metadata.cp_rank, read.function(), ": rank must be that of metadata, ",
        metadata.cp_rank, ", or None, got ", said.value_or(0)
    );
    return {rank_rows(metadata), metadata.cp_rank};
  }
  const auto& layout = py::cast<const PcpLayout&>(rows);
  check(said.has_value(), read.function(), ": rank must be given for a PCPLayout, got None");
  check(
      *said >= 0 && *said < layout.pcp_size, read.function(), ": rank must be in [0, ",
      layout.pcp_size, "), got ", *said
  );
  return {rank_rows(layout), *said};
}

py::tuple halo_of(py::handle metadata, py::handle window, py::handle ratio, py::handle rank) {
  const Arguments read("plan_halo");
  const auto [rows, own] = rows_of(read, metadata, rank);
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
      std::ranges::equal(from.extend_lens, to.extend_lens), read.function(),
      ": target must have the lengths of source, got others"
  );
  RelayoutPlan plan = plan_relayout(rank_rows(from), rank_rows(to), from.cp_rank);
  return py::make_tuple(
      py::cast(plan.send_counts), py::cast(plan.recv_counts),
      int_array(std::move(plan.send_indices)), int_array(std::move(plan.recv_indices))
  );
}

}  // namespace

// The GIL stays held: a plan takes microseconds.
void register_halo(py::module_& module) {
  module.def("plan_halo", &halo_of);
  module.def("plan_relayout", &relayout_of);
}

}  // namespace cpattn::bindings
