// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/fia.h"
#include "ops/fia_layout.h"

namespace cpattn::fia {

/// Which keys a query sees beside the mask: [p - left, p + right] around its
/// position p, the first query standing at 0, or where the last one meets the
/// last key; moved by `shift`, so that neither bound is negative.
struct Band {
  int64_t left = kUnboundedKeys, right = kUnboundedKeys, shift = 0;
  bool right_down = false;
};

/// The band that sparse_mode, pre_tokens and next_tokens ask for.
Band read_band(const FiaArguments& arguments);

/// Checks sparse_mode and atten_mask against each other and the layout. Returns
/// whether the mask is to be read: modes 2 to 4 only insist on their template.
bool check_mask(const FiaArguments& arguments, const Layout& layout);

/// Elements from one sequence of a mask that is read to the next, 0 if they
/// share it. The mask is [S1, S2] after axes of size 1 or B; [B, S2] will do
/// where S1 is 1. A paged mask may have more columns than keys.
int64_t mask_stride(
    const TensorView& mask, int64_t batch, int64_t max_q_len, int64_t max_kv_len, bool paged
);

}  // namespace cpattn::fia
