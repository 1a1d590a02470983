// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tables that ops calls kernels through. Needs the vector layer and the
// engines included first.
#include "kernels/attention/codes-inl.h"
#include "kernels/attention/merge-inl.h"

namespace cpattn::kernels {
namespace {

/// The kernels of a type that packs K and V in all cases. Loop is the packing loop. Lists are
/// indexed by CodeType.
template <class T, class Loop>
constexpr AttentionKernel packing_kernel(int64_t (*peak)(int64_t)) {
  return {
      .scratch_bytes = &Loop::scratch_bytes,
      .run = &Loop::run,
      .peak_flops = peak,
      .decode_scratch_bytes = &Loop::scratch_bytes,
      .decode = &Loop::run,
      .decode_codes = {&Loop::run, &Loop::run, &Loop::run},
      .expand_codes =
          {&expand_codes<T, Float8>, &expand_codes<T, Float8E5M2>, &expand_codes<T, int8_t>},
      .merge = &merge_parts<T>,
  };
}

template <class T, class Decode>
int64_t decode_scratch_bytes(const AttentionTile* tile) {
  return tile->expand_codes == nullptr ? Decode::scratch_bytes(tile)
                                       : CodeDecoder<T, int8_t>::scratch_bytes(tile);
}

/// The kernel of one storage type on one engine; another may decode.
template <class T, class Engine, int kExp2Degree, class DecodeEngine = Engine>
constexpr AttentionKernel attention_kernel() {
  using Decode = DecodeLoop<T, DecodeEngine, kExp2Degree>;
  AttentionKernel kernel =
      packing_kernel<T, AttentionLoop<T, Engine, kExp2Degree>>(&peak_flops<Engine>);
  kernel.decode_scratch_bytes = &decode_scratch_bytes<T, Decode>;
  kernel.decode = &Decode::run;
  kernel.decode_codes[kFloat8E4M3] = &CodeDecoder<T, Float8>::run;
  kernel.decode_codes[kFloat8E5M2] = &CodeDecoder<T, Float8E5M2>::run;
  kernel.decode_codes[kInt8] = &CodeDecoder<T, int8_t>::run;
  return kernel;
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
      .merge_row = {&merge_row<float>, &merge_row<Half>, &merge_row<Bfloat16>},
  };
}

}  // namespace
}  // namespace cpattn::kernels
