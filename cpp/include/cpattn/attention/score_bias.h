// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Describes what is added to the score of a key j for a token at position p of its sequence, after
/// scale and softcap: the sum of what is given. A key for which it is -inf is not seen. Sums of
/// exponentials have it in them; sinks do not.
struct ScoreBias {
  /// Numbers in float32, float16 or bfloat16, by any strides: of all sequences [num_sequences,
  /// num_heads, queries, keys], or a tensor [num_heads, queries, keys] for each of them. An axis of
  /// length 1 counts for all of its indices. Otherwise there are as many queries and keys as the
  /// longest sequence has new tokens and keys, or more, which are not read.
  std::vector<TensorView> numbers;
  bool of_each_sequence = false;  // the latter form
  /// float32 [num_heads] or [num_sequences, num_heads]: -slope * |j - p|, as ALiBi.
  std::optional<TensorView> alibi_slopes;
  /// float32 [num_heads, 2 * m + 1]: number m + j - p, j - p being clamped to [-m, m], as the
  /// buckets of T5 are after their lookup.
  std::optional<TensorView> relative;
  /// Positions p and j of the last two, where keys of a sequence are no neighbours: int32, of each
  /// row of q, and of the keys, those of sequence i from first_key[i] on.
  std::optional<TensorView> token_positions, key_positions;
  std::vector<int64_t> first_key;
};

}  // namespace cpattn
