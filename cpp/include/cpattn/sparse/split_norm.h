// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The projection of hidden states in multi-head latent attention, split and normalised:
///   x [B, q_rank + kv_rank + rope]: the query's latent, the key's latent, and a part of the key
///                                   that rope rotates; float32, float16 or bfloat16
///   RMS(y) = y / sqrt(mean(y^2) + eps) * weight + bias, all in float32, rounded once
/// Weights and biases are float32 or of the dtype of x; results are of the dtype of x and
/// contiguous.
struct SplitNorm {
  const char* function;
  TensorView x;
  TensorView q_weight, kv_weight;  // [q_rank], [kv_rank]
  std::optional<TensorView> q_bias, kv_bias;
  int64_t q_rank = 0, kv_rank = 0, rope_dim = 0;
  float q_eps = 0, kv_eps = 0;
  TensorView q;                      // [B, q_rank]: RMS of the first columns of x
  TensorView k_nope;                 // [B, 1, kv_rank]: RMS of the next columns
  TensorView k_pe;                   // [B, 1, rope]: the last columns, as they are
  std::optional<TensorView> latent;  // [B, 1, kv_rank + rope]: all but the first, as they are
};

/// Writes the results of a SplitNorm from its inputs. Throws std::invalid_argument, which names its
/// `function`, before anything is written, for shapes, dtypes and ranks that do not fit and results
/// that overlap x or each other.
void split_qk_norm(const SplitNorm& arguments);

}  // namespace cpattn
