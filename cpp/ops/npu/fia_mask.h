// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "cpattn/npu/fia.h"
#include "ops/npu/fia_layout.h"
#include "ops/npu/fia_sequences.h"

namespace cpattn::fia {

/// The keys that a query sees beside the mask: [p - left, p + right] around its position p.
/// The first query stands at 0; if right_down, the last one at the last key. `shift` moves
/// positions so that neither bound is negative.
struct Band {
  int64_t left = kUnboundedKeys, right = kUnboundedKeys, shift = 0;
  bool right_down = false;
};

/// The band of sparse_mode, pre_tokens and next_tokens.
Band read_band(const FiaArguments& arguments);

/// Checks sparse_mode and atten_mask against each other and the layout. Returns whether the mask is
/// read: modes 2 to 4 only check their template.
bool check_mask(const FiaArguments& arguments, const Layout& layout);

/// A mask that is read: [S1, S2] after axes of size 1 or B; [B, S2] is enough if S1 is 1, and with
/// blocks there may be more columns than keys.
class ReadMask {
 public:
  /// Checks the shape against the sequences.
  ReadMask(const FiaArguments& arguments, const Sequences& sequences, int64_t max_q_len);

  /// The bits of the sequences of `segments`, which begin with sequence `first`.
  MaskBits pack(std::span<const AttentionSegment> segments, int64_t first) const;

 private:
  TensorView mask_;
  int64_t sequence_stride_;  // 0 if the sequences share it
};

}  // namespace cpattn::fia
