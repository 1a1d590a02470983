// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tables that ops calls kernels through. Needs the vector layer and the
// engines included first.
#include "kernels/attention/decode-inl.h"

namespace cpattn::kernels {
namespace {

/// The kernel of one storage type on one engine; another may decode, and a loop of
/// its own take many rows.
template <
    class T,
    class Engine,
    int kExp2Degree,
    class DecodeEngine = Engine,
    class Loop = AttentionLoop<T, Engine, kExp2Degree>>
constexpr AttentionKernel attention_kernel(int64_t (*peak)(int64_t) = &peak_flops<Engine>) {
  using Decode = DecodeLoop<T, DecodeEngine, kExp2Degree>;
  return {
      .scratch_bytes = &Loop::scratch_bytes,
      .run = &Loop::run,
      .peak_flops = peak,
      .decode_scratch_bytes = &Decode::scratch_bytes,
      .decode = &Decode::run,
      .merge = &merge_parts<T>,
  };
}

/// All kernels of an instruction set. Sets differ in those of the 16-bit types alone.
constexpr KernelTable kernel_table(
    const char* name,
    AttentionKernel bfloat16,
    AttentionKernel float16 = attention_kernel<Half, Float32Engine, 4>()
) {
  return {
      .name = name,
      .attention = {attention_kernel<float, Float32Engine, 6>(), float16, bfloat16},
      .weighted_sum = {&weighted_sum<float>, &weighted_sum<Half>, &weighted_sum<Bfloat16>},
  };
}

}  // namespace
}  // namespace cpattn::kernels
