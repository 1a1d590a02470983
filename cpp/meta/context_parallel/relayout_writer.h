// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpattn/context_parallel/halo.h"

namespace cpattn {

/// Writes the plan of a rank. Rows are added in an order that sender and receiver both know;
/// received rows are added by rank.
class RelayoutWriter {
 public:
  explicit RelayoutWriter(int64_t cp_size) : sent_(cp_size) {
    plan_.send_counts.resize(cp_size);
    plan_.recv_counts.resize(cp_size);
  }

  void send(int64_t to, int64_t first, int64_t count, int64_t step = 1) {
    add(sent_[to], first, count, step);
  }
  void receive(int64_t from, int64_t first, int64_t count, int64_t step = 1) {
    add(plan_.recv_indices, first, count, step);
    plan_.recv_counts[from] += count;
  }
  RelayoutPlan plan() {
    for (std::size_t to = 0; to < sent_.size(); ++to) {
      const RelayoutPlan::Ints& rows = sent_[to];
      plan_.send_counts[to] = static_cast<int64_t>(rows.size());
      plan_.send_indices.insert(plan_.send_indices.end(), rows.begin(), rows.end());
    }
    return std::move(plan_);
  }

 private:
  static void add(RelayoutPlan::Ints& out, int64_t first, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; ++i) out.push_back(first + i * step);
  }

  std::vector<RelayoutPlan::Ints> sent_;  // to each rank
  RelayoutPlan plan_;
};

}  // namespace cpattn
