// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "cpattn/base/check.h"
#include "cpattn/context_parallel/halo.h"

namespace cpattn::bindings {

/// The rows of all ranks, and the rank of the call: metadata has one, a layout needs one given.
inline std::pair<RankRows, int64_t> rank_rows_value(
    const Arguments& read, pybind11::handle rows, pybind11::handle rank
) {
  const std::optional<int64_t> said = read.optional_integer(rank, "rank");
  if (!pybind11::isinstance<PcpLayout>(rows)) {
    const auto& metadata = read.value<ContextParallelMetadata>(rows, "metadata");
    check(
        !said || *said == metadata.cp_rank, read.function(), ": rank must be that of metadata, ",
        metadata.cp_rank, ", or None, got ", said.value_or(0)
    );
    return {rank_rows(metadata), metadata.cp_rank};
  }
  const auto& layout = pybind11::cast<const PcpLayout&>(rows);
  check(said.has_value(), read.function(), ": rank must be given for a PCPLayout, got None");
  check(
      *said >= 0 && *said < layout.pcp_size, read.function(), ": rank must be in [0, ",
      layout.pcp_size, "), got ", *said
  );
  return {rank_rows(layout), *said};
}

/// The fields of Python's RelayoutPlan.
inline pybind11::tuple relayout_fields(RelayoutPlan plan) {
  return pybind11::make_tuple(
      pybind11::cast(plan.send_counts), pybind11::cast(plan.recv_counts),
      int_array(std::move(plan.send_indices)), int_array(std::move(plan.recv_indices))
  );
}

}  // namespace cpattn::bindings
