// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/attention/key_visibility.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// Positions of the tokens and keys of a batch whose rows of the page table are parts of sequences:
/// each has some of a sequence's keys, which need not be neighbours.
struct BiasPositions {
  TensorView tokens, keys;               // int32: of each row of q; of keys, ascending in each part
  std::vector<int64_t> first_key;        // of each part among the keys
  std::vector<int64_t> sequences;        // the sequence of each part
  std::vector<int64_t> first_positions;  // of each sequence's first new token
};

/// The bias that is added to the score of key j for a token at position p of its sequence, after
/// scale and softcap: the sum of the terms given below. A bias of -inf hides the key. Sums of
/// exponentials include the bias; sinks do not.
struct ScoreBias {
  /// Numbers in float32, float16 or bfloat16, with any strides: one tensor [num_sequences,
  /// num_heads, queries, keys], or a tensor [num_heads, queries, keys] for each sequence. An axis
  /// of length 1 is broadcast. Otherwise `queries` and `keys` are at least the new tokens and the
  /// keys of the longest sequence; further entries are not read.
  std::vector<TensorView> numbers;
  bool of_each_sequence = false;  // numbers has a tensor for each sequence
  /// float32 [num_heads] or [num_sequences, num_heads]: -slope * |j - p|, as ALiBi.
  std::optional<TensorView> alibi_slopes;
  /// float32 [num_heads, 2 * m + 1]: number m + j - p, j - p being clamped to [-m, m], like T5's
  /// buckets after their lookup.
  std::optional<TensorView> relative_bias;
  /// Positions, if a batch has parts of sequences; the tensors above describe whole sequences.
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
