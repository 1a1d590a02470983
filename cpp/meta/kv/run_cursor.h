// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpattn/kv/placement.h"

namespace cpattn {

/// The run of the current index. Successive indices mostly stay within a run, so most need no
/// division.
class RunCursor {
 public:
  explicit RunCursor(const Interleave& interleave) : interleave_(interleave) {}

  /// Goes to the run of an index >= 0.
  void seek(int64_t index) {
    if (index >= first_ && index - first_ < interleave_.run_len) return;
    const int64_t run = index / interleave_.run_len;
    first_ = run * interleave_.run_len;
    owner_ = run % interleave_.shard_size;
    local_first_ = run / interleave_.shard_size * interleave_.run_len;
  }
  int64_t owner() const { return owner_; }
  int64_t local(int64_t index) const { return local_first_ + (index - first_); }

 private:
  Interleave interleave_;
  int64_t first_ = 0;        // index of the run
  int64_t owner_ = 0;        // its rank
  int64_t local_first_ = 0;  // and the local index of its first index
};

}  // namespace cpattn
