// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/key_window.h"
#include "cpattn/base/tensor_view.h"

namespace cpattn {

/// The numbers of new tokens and of keys of a sequence. The new tokens stand at the last keys.
struct SequenceLens {
  int64_t q_len = 0;
  int64_t kv_len = 0;
};

/// The conditions under which a token at position p of its sequence sees key j: all must hold.
///
/// A mask has a row for each new token of a sequence, with a value for each of its keys, cached
/// ones first; rows follow each other, sequence after sequence. It is either custom_mask or
/// packed_custom_mask. In the latter, value i of a sequence is bit i % 8 of its byte i / 8; every
/// sequence begins at a new byte.
struct KeyVisibility {
  bool causal = true;                                  // j <= p
  std::optional<std::vector<uint8_t>> causal_of_each;  // overrides causal for each sequence
  std::optional<KeyWindow> window;                     // p - left <= j <= p + right
  /// begin <= j < end, for the begin and end of each new token: [sum(q_lens)][2], within
  /// [0, kv_len]. Both ascend within a sequence, so that rows share the keys that they read.
  std::optional<std::vector<int64_t>> key_ranges;
  std::optional<TensorView> custom_mask;         // bool [sum(q_len * kv_len)], contiguous
  std::optional<TensorView> packed_custom_mask;  // uint8 [sum(ceil(q_len * kv_len / 8))],
                                                 // contiguous

  bool is_causal(int64_t sequence) const {
    return causal_of_each ? (*causal_of_each)[sequence] != 0 : causal;
  }
};

}  // namespace cpattn
