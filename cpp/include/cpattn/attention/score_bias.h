// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/attention/key_visibility.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Positions of the tokens and keys of a batch in which a row of the page table has a part of the
/// keys of a sequence, which are no neighbours.
struct BiasPositions {
  TensorView tokens, keys;               // int32: of each row of q; of keys, ascending in each part
  std::vector<int64_t> first_key;        // of each part among the keys
  std::vector<int64_t> sequences;        // of which each part is
  std::vector<int64_t> first_positions;  // of each sequence: that of its first new token
};

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
  std::optional<TensorView> relative_bias;
  /// Positions, if a batch has parts of sequences; the tensors above are of whole ones.
  std::optional<BiasPositions> positions;
};

/// Checks the shapes and dtypes of a bias of sequences, and that slopes are finite. Throws
/// std::invalid_argument, which names `function` and the argument.
void check_bias(
    const char* function,
    const ScoreBias& bias,
    int64_t num_heads,
    std::span<const SequenceLens> sequences
);

}  // namespace cpattn
