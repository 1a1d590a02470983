// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/split_results.h"

#include "kernels/boundary/attention_kernel.h"

namespace cpattn {

SplitResults::SplitResults(const AttentionPlan& plan)
    : plan_(plan),
      row_floats_(padded_dim(plan.batch.shape.v_head_dim) + kPartialStateFloats),
      results_(new float[plan.partial_rows * row_floats_]),
      parts_left_(plan.splits.size()) {
  for (std::size_t i = 0; i < parts_left_.size(); ++i) parts_left_[i] = plan.splits[i].num_parts;
}

float* SplitResults::results_of(const AttentionSplit& split, int64_t part) const {
  return results_.get() + (split.first_row + part * split.rows) * row_floats_;
}

float* SplitResults::results_of(const AttentionItem& item) const {
  if (item.split < 0) return nullptr;
  const AttentionSplit& split = plan_.splits[item.split];
  return results_of(split, (item.kv_begin - split.first_key) / plan_.part_keys);
}

const float* SplitResults::finish(const AttentionItem& item) {
  // The last part sees the writes of the others before they counted down.
  if (item.split < 0 || parts_left_[item.split].fetch_sub(1, std::memory_order_acq_rel) > 1) {
    return nullptr;
  }
  return results_of(plan_.splits[item.split], 0);
}

}  // namespace cpattn
