// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels on AMX tiles, of hardware or twin. Needs the vector layer and the
// tiles included first.
#include "kernels/amx/attention-inl.h"
#include "kernels/amx/decode-inl.h"
#include "kernels/amx/few_rows-inl.h"
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {
namespace {

/// The loop of prompts: by tiles, or by vectors if rows are padded, which tiles do not read.
template <class T, class Engine>
struct AmxOrPadded {
  using Padded = AttentionLoop<T, Engine, 4>;

  static int64_t scratch_bytes(const AttentionTile* tile) {
    return is_padded(*tile) ? Padded::scratch_bytes(tile) : AmxLoop<T>::scratch_bytes(tile);
  }
  static bool run(const AttentionTile* tile, void* scratch) {
    return is_padded(*tile) ? Padded::run(tile, scratch) : AmxLoop<T>::run(tile, scratch);
  }
};

/// The loop of decode: the vector units multiply up to kVectorRows rows of a KV head, in float32,
/// and tiles multiply more.
template <class T, class Engine, int kVectorRows>
struct VectorsOrTiles {
  using Packing = AmxOrPadded<T, Engine>;
  using Decode = DecodeLoop<T, Float32Engine, 4>;
  /// Rows that are no more work for the vector units than unpacking codes for tiles.
  static constexpr int kLoneRows = 2;

  static bool by_vectors(const AttentionTile& tile) {
    return tile.num_tokens * tile.group <= kVectorRows;
  }
  static int64_t scratch_bytes(const AttentionTile* tile) {
    return by_vectors(*tile) ? decode_scratch_bytes<T, Decode>(tile) : Packing::scratch_bytes(tile);
  }
  template <class Loop>
  static bool run(const AttentionTile* tile, void* scratch) {
    return by_vectors(*tile) ? Loop::run(tile, scratch) : Packing::run(tile, scratch);
  }

  /// Whether AmxDecode takes the tile. In float16 it would need three products for each.
  template <class Code>
  static bool in_place(const AttentionTile& tile) {
    return TileFormat<T>::kParts == 1 && !is_padded(tile) &&
           tile.num_tokens * tile.group > kLoneRows && AmxDecode<Code>::takes(tile);
  }
  /// Loads tiles from where keys are, if that is possible and the results are finite; else does
  /// what run() does.
  template <class Code, class Loop>
  static bool decode(const AttentionTile* tile, void* scratch) {
    if (in_place<Code>(*tile)) {
      AmxDecode<Code> attempt(*tile, static_cast<char*>(scratch));
      if (!attempt.run()) return false;
      if (attempt.finite()) return true;
    }
    return run<Loop>(tile, scratch);
  }
  template <class Code>
  static int64_t decode_scratch(const AttentionTile* tile) {
    const int64_t bytes = scratch_bytes(tile);
    return in_place<Code>(*tile) ? larger(bytes, AmxDecode<Code>::scratch_bytes(*tile)) : bytes;
  }

  static constexpr AttentionKernel kernel(int64_t (*peak)(int64_t)) {
    AttentionKernel kernel = packing_kernel<T, Packing>(peak);
    kernel.decode_scratch_bytes = &decode_scratch<Bfloat16>;
    kernel.decode = &decode<Bfloat16, Decode>;
    kernel.decode_codes[kFloat8E4M3] = &decode<Float8, CodeDecoder<T, Float8>>;
    kernel.decode_codes[kFloat8E5M2] = &decode<Float8E5M2, CodeDecoder<T, Float8E5M2>>;
    kernel.decode_codes[kInt8] = &decode<int8_t, CodeDecoder<T, int8_t>>;
    return kernel;
  }
};

/// float16 is three products where float32 is one: its speed is measured against the
/// latter, and more rows are needed before tiles are faster than vectors: on a Xeon they take
/// 1.7 times as long with 16 rows of head dimension 128 as in bfloat16, where the vectors keep up
/// with the memory for 4 rows.
constexpr KernelTable amx_kernel_table(const char* name) {
  return kernel_table(
      name, VectorsOrTiles<Bfloat16, Bfloat16Engine, 4>::kernel(&tile_peak_flops),
      VectorsOrTiles<Half, Float32Engine, 16>::kernel(&peak_flops<Float32Engine>)
  );
}

}  // namespace
}  // namespace cpattn::kernels
