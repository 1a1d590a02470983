// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tables that ops calls kernels through. Needs the vector layer and the
// engines included first.
#include "kernels/attention/choose-inl.h"
#include "kernels/attention/in_place_codes-inl.h"
#include "kernels/attention/packed-inl.h"
#include "kernels/rows/codes-inl.h"
#include "kernels/softmax/merge-inl.h"

namespace cpattn::kernels {
namespace {

/// The loops of an element type on vectors. Unpacked operands may have another engine.
template <class T, class Engine, int kExp2Degree, class UnpackedEngine = Engine>
struct VectorLoops {
  using Element = T;
  using Packed = PackedLoop<T, Engine, kExp2Degree>;
  using PrecisePacked = PackedLoop<T, Engine, kExp2Degree, kWeightParts<Engine>>;
  template <int kParts, class Stored>
  using InPlace = InPlaceLoop<T, UnpackedEngine, kExp2Degree, kParts, Stored>;
  static constexpr int kPreciseParts = kWeightParts<UnpackedEngine>;
  static constexpr bool kShortOperands = kPreciseParts > 1;
  static constexpr LoopLimits kLimits{};

  static int64_t scratch_bytes(AttentionLoop loop, const AttentionTile* tile) {
    return loop == kInPlace ? in_place_scratch_bytes<VectorLoops>(tile)
                            : PrecisePacked::scratch_bytes(tile);
  }
  static bool run(AttentionLoop loop, const AttentionTile* tile, void* scratch) {
    if (loop == kInPlace) {
      return tile->precise ? run_in_place<VectorLoops, kPreciseParts>(tile, scratch)
                           : run_in_place<VectorLoops, 1>(tile, scratch);
    }
    return tile->precise ? PrecisePacked::run(tile, scratch) : Packed::run(tile, scratch);
  }
};

/// The kernel of an element type.
template <class Loops>
constexpr AttentionKernel attention_kernel(int64_t (*peak)(int64_t)) {
  using T = typename Loops::Element;
  return {
      .choose = [](const AttentionTile* tile) { return choose(*tile, Loops::kLimits); },
      .scratch_bytes = [](
                           const AttentionTile* tile
                       ) { return Loops::scratch_bytes(choose(*tile, Loops::kLimits), tile); },
      .run = [](const AttentionTile* tile,
                void* scratch) { return Loops::run(choose(*tile, Loops::kLimits), tile, scratch); },
      .peak_flops = peak,
      .expand_codes =
          {&expand_codes<T, Float8>, &expand_codes<T, Float8E5M2>, &expand_codes<T, int8_t>},
      .merge = &merge_parts<T>,
  };
}
template <class T, class Engine, int kExp2Degree, class UnpackedEngine = Engine>
constexpr AttentionKernel vector_kernel() {
  return attention_kernel<VectorLoops<T, Engine, kExp2Degree, UnpackedEngine>>(&peak_flops<Engine>);
}

/// All kernels of an instruction set. Sets differ only in the kernels of the 16-bit types.
constexpr KernelTable kernel_table(
    const char* name,
    AttentionKernel bfloat16,
    AttentionKernel float16 = vector_kernel<Half, Float32Engine, 4>()
) {
  return {
      .name = name,
      .attention = {vector_kernel<float, Float32Engine, 6>(), float16, bfloat16},
      .merge_row = {&merge_row<float>, &merge_row<Half>, &merge_row<Bfloat16>},
      .merge_lse = &merge_lse,
  };
}

}  // namespace
}  // namespace cpattn::kernels
