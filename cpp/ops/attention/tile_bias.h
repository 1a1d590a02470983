// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/attention/attention_plan.h"
#include "cpattn/attention/score_bias.h"
#include "kernels/boundary/attention_kernel.h"

namespace cpattn {

/// Checks a bias for the new tokens and keys that the segments of a batch read.
void check_bias(const char* function, const ScoreBias& bias, const AttentionBatch& batch);

/// Calls function(name, tensor) for each tensor of a bias.
template <class Function>
void for_tensors(const ScoreBias& bias, Function function) {
  for (const TensorView& tensor : bias.numbers) function("bias", tensor);
  if (bias.alibi_slopes) function("alibi_slopes", *bias.alibi_slopes);
  if (bias.relative_bias) function("relative_bias", *bias.relative_bias);
  if (!bias.positions) return;
  function("token_positions", bias.positions->tokens);
  function("key_positions", bias.positions->keys);
}

/// The bias of an item in the form of the kernels.
kernels::TileBias tile_bias(
    const ScoreBias& bias, const AttentionBatch& batch, const AttentionItem& item
);

}  // namespace cpattn
