// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "kernels/attention/attention_kernel.h"

namespace cpattn {

/// Lets the kernel of a tile poll `stop`, and, while a trace is taken, tell which step it is at.
inline void hook_tile(kernels::AttentionTile& tile, StopToken& stop, const DType& dtype) {
  static_assert(static_cast<int>(TraceScope::pack) == kernels::kMarkPack);
  static_assert(static_cast<int>(TraceScope::qk) == kernels::kMarkQk);
  static_assert(static_cast<int>(TraceScope::softmax) == kernels::kMarkSoftmax);
  static_assert(static_cast<int>(TraceScope::pv) == kernels::kMarkPv);
  static_assert(static_cast<int>(TraceScope::write) == kernels::kMarkWrite);
  tile.should_stop = [](void* token) { return static_cast<StopToken*>(token)->should_stop(); };
  tile.stop_context = &stop;
  if (!tracing()) return;
  tile.mark = [](void* type, int32_t scope, int64_t flops) {
    trace_mark(static_cast<TraceScope>(scope), flops, *static_cast<const DType*>(type));
  };
  tile.mark_context = const_cast<DType*>(&dtype);
}

}  // namespace cpattn
