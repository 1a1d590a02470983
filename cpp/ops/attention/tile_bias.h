// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/score_bias.h"
#include "kernels/boundary/attention_kernel.h"
#include "ops/attention/key_visibility.h"

namespace cpattn {

/// Checks the shapes and dtypes of a bias of sequences, and that slopes are finite. Throws
/// std::invalid_argument, which names `function` and the argument.
void check_bias(
    const char* function,
    const ScoreBias& bias,
    int64_t num_heads,
    std::span<const SequenceLens> sequences
);

/// Checks a bias for the new tokens and keys that the segments of a batch read.
void check_bias(const char* function, const ScoreBias& bias, const AttentionBatch& batch);

/// Calls function(name, tensor) for each tensor of a bias.
template <class Function>
void for_tensors(const ScoreBias& bias, Function function) {
  for (const TensorView& tensor : bias.numbers) function("bias", tensor);
  if (bias.alibi_slopes) function("alibi_slopes", *bias.alibi_slopes);
  if (bias.relative) function("relative_bias", *bias.relative);
  if (bias.token_positions) function("token_positions", *bias.token_positions);
  if (bias.key_positions) function("key_positions", *bias.key_positions);
}

/// The bias of an item, as kernels take it.
kernels::TileBias tile_bias(
    const ScoreBias& bias, const AttentionBatch& batch, const AttentionItem& item
);

}  // namespace cpattn
