// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels on AMX tiles, of hardware or twin. Needs the vector layer and the
// tiles included first.
#include "kernels/amx/attention-inl.h"
#include "kernels/amx/few_rows-inl.h"
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {
namespace {

/// Decode() for up to kMaxRows rows of a KV head, which the vector units take in float32, and the
/// tiles for more.
template <class T, class Decode, int kMaxRows>
struct VectorsOrTiles {
  static bool by_vectors(const AttentionTile& tile) {
    return tile.num_tokens * tile.group <= kMaxRows;
  }
  static int64_t scratch_bytes(const AttentionTile* tile) {
    return by_vectors(*tile) ? decode_scratch_bytes<T, DecodeLoop<T, Float32Engine, 4>>(tile)
                             : AmxLoop<T>::scratch_bytes(tile);
  }
  static bool run(const AttentionTile* tile, void* scratch) {
    return by_vectors(*tile) ? Decode::run(tile, scratch) : AmxLoop<T>::run(tile, scratch);
  }
};

template <class T, int kMaxRows>
constexpr AttentionKernel tile_attention_kernel(int64_t (*peak)(int64_t)) {
  using Decode = VectorsOrTiles<T, DecodeLoop<T, Float32Engine, 4>, kMaxRows>;
  AttentionKernel kernel = packing_kernel<T, AmxLoop<T>>(peak);
  kernel.decode_scratch_bytes = &Decode::scratch_bytes;
  kernel.decode = &Decode::run;
  kernel.decode_codes[kFloat8E4M3] = &VectorsOrTiles<T, CodeDecoder<T, Float8>, kMaxRows>::run;
  kernel.decode_codes[kFloat8E5M2] = &VectorsOrTiles<T, CodeDecoder<T, Float8E5M2>, kMaxRows>::run;
  kernel.decode_codes[kInt8] = &VectorsOrTiles<T, CodeDecoder<T, int8_t>, kMaxRows>::run;
  return kernel;
}

/// float16 is three products where float32 is one: its speed is measured against the
/// latter, and more rows are needed before tiles are faster than vectors: on a Xeon they take
/// 1.7 times as long with 16 rows of head dimension 128 as in bfloat16, where the vectors keep up
/// with the memory for 4 rows.
constexpr KernelTable amx_kernel_table(const char* name) {
  return kernel_table(
      name, tile_attention_kernel<Bfloat16, 4>(&tile_peak_flops),
      tile_attention_kernel<Half, 16>(&peak_flops<Float32Engine>)
  );
}

}  // namespace
}  // namespace cpattn::kernels
