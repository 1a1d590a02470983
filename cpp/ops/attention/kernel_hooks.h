// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "kernels/boundary/attention_kernel.h"

namespace cpattn {

/// Sets the dimensions of the heads of a tile; those of its rope part may be 0.
inline void set_dims(
    kernels::AttentionTile& tile, int64_t nope_dim, int64_t rope_dim, int64_t v_head_dim
) {
  const auto narrow = [](int64_t dim) { return static_cast<int32_t>(dim); };
  tile.nope_dim = narrow(padded_dim(nope_dim));
  tile.rope_dim = narrow(padded_dim(rope_dim));
  tile.v_head_dim = narrow(padded_dim(v_head_dim));
  if (tile.nope_dim > nope_dim || tile.rope_dim > rope_dim || tile.v_head_dim > v_head_dim) {
    tile.stored = {narrow(nope_dim), narrow(rope_dim), narrow(v_head_dim)};
  }
}

/// Lets the kernel of a tile poll `stop` and, while a trace is on, report its step.
inline void hook_tile(kernels::AttentionTile& tile, StopToken& stop, const DType& dtype) {
  static_assert(static_cast<int>(TraceScope::pack) == kernels::kMarkPack);
  static_assert(static_cast<int>(TraceScope::qk) == kernels::kMarkQk);
  static_assert(static_cast<int>(TraceScope::softmax) == kernels::kMarkSoftmax);
  static_assert(static_cast<int>(TraceScope::pv) == kernels::kMarkPv);
  static_assert(static_cast<int>(TraceScope::write) == kernels::kMarkWrite);
  tile.hooks.should_stop = [](void* token) {
    return static_cast<StopToken*>(token)->should_stop();
  };
  tile.hooks.stop_context = &stop;
  if (!tracing()) return;
  tile.hooks.mark = [](void* type, int32_t scope, int64_t flops) {
    trace_mark(static_cast<TraceScope>(scope), flops, *static_cast<const DType*>(type));
  };
  tile.hooks.mark_context = const_cast<DType*>(&dtype);
}

}  // namespace cpattn
