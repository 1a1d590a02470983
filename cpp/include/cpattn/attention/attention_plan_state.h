// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cpattn/attention/attention_plan.h"

namespace cpattn {

/// The numbers that determine a plan of plan_sequences: enough to store it and make it again.
struct AttentionPlanState {
  AttentionShape shape;
  std::vector<int64_t> q_lens, kv_lens;               // [num_sequences]
  std::vector<int64_t> first_positions, left, right;  // [num_sequences], of AttentionSegment
  std::vector<int64_t> page_ids;                      // of all sequences, one after the other
  int64_t page_size = 0;
  int64_t num_pages = 0;
  bool has_mask = false;
  std::vector<uint8_t> mask_bits;   // MaskBits::bits
  std::vector<int64_t> key_ranges;  // AttentionBatch::key_ranges
  bool batch_invariant = false;
  bool precise = false;
  int num_threads = 0;
};

/// The state of a plan.
AttentionPlanState state_of(const AttentionPlan& plan);

/// The plan that a state determines. Throws std::invalid_argument for a state that no plan has.
AttentionPlan plan_of(const AttentionPlanState& state);

}  // namespace cpattn
