// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/base/index_table.h"
#include "cpattn/context_parallel/halo.h"
#include "cpattn/kv/placement.h"

namespace cpattn {

/// The pools in which ranks keep compressed units, a row of a pool for each unit. A unit is made of
/// several tokens and has a position in its sequence of units.
struct UnitPools {
  enum class Sharing : uint8_t {
    nothing,  // each rank keeps all units
    units,    // the placement is of units of a sequence; tables have pages of this rank's units
    slots,    // the placement is of slots of all pools together; tables have pages of these slots
  };

  IndexTable block_tables;  // [bs, pages]
  int64_t page_size = 1;    // units of a page
  Sharing sharing = Sharing::nothing;
  Interleave placement;  // over the ranks of the rows; for slots by pages of page_size
};

/// Plans how units go from the ranks that compute them, in the order of HaloPlan, to the ranks that
/// keep them. The source is the units of a rank in the order of its HaloPlan, the target the slots
/// of its pool. Units that every rank computes are not sent. Throws std::invalid_argument, which
/// names `function`, for a ratio outside [1, 2^31), and pools that do not fit the rows or lack the
/// page of a unit that this rank keeps (with shared slots: of any unit).
RelayoutPlan plan_units(
    const RankRows& rows, int64_t rank, int64_t ratio, const UnitPools& pools, const char* function
);

}  // namespace cpattn
