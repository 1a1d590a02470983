// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/key_window.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The new tokens of a sequence, and its keys: they stand at the last of these.
struct SequenceLens {
  int64_t q_len = 0;
  int64_t kv_len = 0;
};

/// Conditions of what a token at position p of its sequence sees: each key j that meets them all.
///
/// A mask has a row for each new token of a sequence, with a value for each of its keys, cached
/// ones first; rows follow each other, sequence after sequence. It is either custom_mask, or
/// packed_custom_mask, in which the values of a sequence are bits, bit i being bit i % 8 of byte
/// i / 8, and every sequence begins at a byte of its own.
struct KeyVisibility {
  bool causal = true;                                  // j <= p
  std::optional<std::vector<uint8_t>> causal_of_each;  // that of each sequence, instead
  std::optional<KeyWindow> window;                     // p - left <= j <= p + right
  std::optional<TensorView> custom_mask;               // bool [sum(q_len * kv_len)], contiguous
  std::optional<TensorView> packed_custom_mask;        // uint8 [sum(ceil(q_len * kv_len / 8))],
                                                       // contiguous

  bool is_causal(int64_t sequence) const {
    return causal_of_each ? (*causal_of_each)[sequence] != 0 : causal;
  }
};

}  // namespace cpattn
