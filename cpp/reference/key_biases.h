// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpattn/reference/reference.h"
#include "reference/rows.h"

namespace cpattn::reference {

/// The position of a sequence's first query among its keys.
inline int64_t first_position(const PagedAttention& batch, int64_t sequence) {
  if (batch.first_positions) return (*batch.first_positions)[sequence];
  return batch.kv_lens[sequence] - batch.q_lens[sequence];
}

/// The biases of the scores of a batch, their shapes checked.
class KeyBiases {
 public:
  explicit KeyBiases(const PagedAttention& batch) : batch_(batch) {
    const auto sequences = static_cast<int64_t>(batch.q_lens.size());
    const int64_t heads = batch.q.dim(1);
    check(
        !batch.bias_of_each || static_cast<int64_t>(batch.bias.size()) == sequences, kName,
        "bias must be a tensor or ", sequences, " tensors, got ", batch.bias.size()
    );
    for (int64_t r = 0; r < sequences && !batch.bias.empty(); ++r) {
      const TensorView& numbers = of_sequence(r);
      const int axes = batch.bias_of_each ? 3 : 4;
      check(numbers.rank == axes, kName, "bias must have ", axes, " axes, got ", ShapeOf{numbers});
      const bool fits = (numbers.rank == 3 || numbers.dim(0) == 1 || numbers.dim(0) == sequences) &&
                        (numbers.dim(axes - 3) == 1 || numbers.dim(axes - 3) == heads) &&
                        (numbers.dim(axes - 2) == 1 || numbers.dim(axes - 2) >= batch.q_lens[r]) &&
                        (numbers.dim(axes - 1) == 1 || batch.q_lens[r] == 0 ||
                         numbers.dim(axes - 1) >= batch.kv_lens[r]);
      check(
          fits, kName, "bias must have ", heads, " heads, ", batch.q_lens[r], " queries and ",
          batch.kv_lens[r], " keys at index ", r, ", got ", ShapeOf{numbers}
      );
    }
    if (const auto& slopes = batch.alibi_slopes) {
      check(
          (slopes->rank == 1 || (slopes->rank == 2 && slopes->dim(0) == sequences)) &&
              slopes->dim(slopes->rank - 1) == heads,
          kName, "alibi_slopes must be [", heads, "] or [", sequences, ", ", heads, "], got ",
          ShapeOf{*slopes}
      );
    }
    if (const auto& table = batch.relative_bias) {
      check(
          table->rank == 2 && table->dim(0) == heads && table->dim(1) % 2 == 1, kName,
          "relative_bias must be [", heads, ", an odd number], got ", ShapeOf{*table}
      );
    }
  }

  bool any() const { return !batch_.bias.empty() || batch_.alibi_slopes || batch_.relative_bias; }

  /// The biases of the visible keys that no -inf hides; `seen` becomes these keys.
  Eigen::ArrayXd of_row(
      int64_t sequence,
      int64_t query,
      int64_t head,
      const std::vector<int64_t>& visible,
      std::vector<int64_t>& seen
  ) const {
    std::vector<double> biases;
    seen.clear();
    for (const int64_t key : visible) {
      const double number = at(sequence, query, head, key);
      if (number == -std::numeric_limits<double>::infinity()) continue;
      biases.push_back(number);
      seen.push_back(key);
    }
    return Eigen::Map<Eigen::ArrayXd>(biases.data(), std::ssize(biases));
  }

 private:
  double at(int64_t sequence, int64_t query, int64_t head, int64_t key) const {
    const int64_t distance = key - first_position(batch_, sequence) - query;
    double sum = 0;
    if (!batch_.bias.empty()) {
      const TensorView& numbers = of_sequence(sequence);
      const int64_t index[] = {sequence, head, query, key};
      int64_t offset = 0;
      for (int axis = 0; axis < numbers.rank; ++axis) {
        const int64_t at = index[axis + 4 - numbers.rank];
        offset += numbers.dim(axis) == 1 ? 0 : at * numbers.stride(axis);
      }
      sum += read_element(numbers, offset);
    }
    if (const auto& slopes = batch_.alibi_slopes) {
      int64_t offset = head * slopes->stride(slopes->rank - 1);
      if (slopes->rank == 2) offset += sequence * slopes->stride(0);
      sum -= read_element(*slopes, offset) * static_cast<double>(std::abs(distance));
    }
    if (const auto& table = batch_.relative_bias) {
      const int64_t farthest = table->dim(1) / 2;
      const int64_t column = farthest + std::clamp(distance, -farthest, farthest);
      sum += read_element(*table, head * table->stride(0) + column * table->stride(1));
    }
    return sum;
  }

  static constexpr const char* kName = "reference.paged_attention: ";

  const TensorView& of_sequence(int64_t sequence) const {
    return batch_.bias[batch_.bias_of_each ? sequence : 0];
  }

  const PagedAttention& batch_;
};

}  // namespace cpattn::reference
