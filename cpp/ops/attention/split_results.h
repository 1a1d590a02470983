// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cpattn/attention/attention_plan.h"

namespace cpattn {

/// The results of the parts of split items while a plan runs. Any thread may run
/// any part; the thread that finishes the last part of a split merges all its parts in order.
class SplitResults {
 public:
  explicit SplitResults(const AttentionPlan& plan);

  /// The memory for the results of a part; null for an item that is whole.
  float* results_of(const AttentionItem& item) const;

  /// Notes that an item is done. Returns the results of all parts of its split if it was the last
  /// part, else null.
  const float* finish(const AttentionItem& item);

 private:
  float* results_of(const AttentionSplit& split, int64_t part) const;

  const AttentionPlan& plan_;
  int64_t row_floats_;
  std::unique_ptr<float[]> results_;
  std::vector<std::atomic<int32_t>> parts_left_;
};

}  // namespace cpattn
