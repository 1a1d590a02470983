// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels on AMX tiles, of hardware or twin. Needs the vector layer and the
// tiles included first.
#include "kernels/attention/amx/few_rows-inl.h"
#include "kernels/attention/amx/in_place-inl.h"
#include "kernels/attention/amx/packed-inl.h"
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {
namespace {

static_assert(kFewTileRows == kGroupRows, "kFewRowTiles takes one group of rows");
static_assert(kInPlaceTileRows == kTileRows);

/// The loops of an element type on tiles and, for up to kInPlaceRows of a KV head whose keys may be
/// read in place, on vectors in float32.
template <class T, class Engine, int kInPlaceRows>
struct TileLoops {
  using Element = T;
  using Precise = typename TileFormat<T>::Precise;
  using Vectors = VectorLoops<T, Engine, 4, Float32Engine>;
  /// float16 would need three products for each of kInPlaceTiles.
  static constexpr LoopLimits kLimits{
      .tiles = true, .in_place_tiles = TileFormat<T>::kParts == 1, .in_place_rows = kInPlaceRows
  };

  static int64_t scratch_bytes(AttentionLoop loop, const AttentionTile* tile) {
    if (loop != kInPlaceTiles) return scratch_bytes_of_others(loop, tile);
    const AttentionTile other = precisely(tile);
    return larger(
        AmxInPlace<Bfloat16>::scratch_bytes(*tile),
        scratch_bytes_of_others(without_in_place(tile), &other)
    );
  }

  static bool run(AttentionLoop loop, const AttentionTile* tile, void* scratch) {
    if constexpr (kLimits.in_place_tiles) {
      if (loop == kInPlaceTiles) return run_in_place_tiles(tile, static_cast<char*>(scratch));
    }
    return run_others(loop, tile, static_cast<char*>(scratch));
  }

 private:
  /// The tile for a loop that stands in for kInPlaceTiles, which rounds no weights.
  static AttentionTile precisely(const AttentionTile* tile) {
    AttentionTile other = *tile;
    other.precise = true;
    return other;
  }

  /// The loop for tiles whose results are not finite in kInPlaceTiles.
  static AttentionLoop without_in_place(const AttentionTile* tile) {
    LoopLimits limits = kLimits;
    limits.in_place_tiles = false;
    return choose(*tile, limits);
  }

  /// Scratch of the loops other than kInPlaceTiles.
  static int64_t scratch_bytes_of_others(AttentionLoop loop, const AttentionTile* tile) {
    switch (loop) {
      case kTiles:
        return tile->precise ? AmxPacked<Precise>::scratch_bytes(*tile)
                             : AmxPacked<T>::scratch_bytes(*tile);
      case kFewRowTiles:
        return tile->precise ? AmxFewRows<Precise>::scratch_bytes(*tile)
                             : AmxFewRows<T>::scratch_bytes(*tile);
      default:
        return Vectors::scratch_bytes(loop, tile);
    }
  }

  /// Runs a loop other than kInPlaceTiles.
  static bool run_others(AttentionLoop loop, const AttentionTile* tile, char* scratch) {
    switch (loop) {
      case kTiles:
        return tile->precise ? run_packed<Precise>(tile, scratch) : run_packed<T>(tile, scratch);
      case kFewRowTiles:
        return tile->precise ? AmxFewRows<Precise>(*tile, scratch).run()
                             : AmxFewRows<T>(*tile, scratch).run();
      default:
        return Vectors::run(loop, tile, scratch);
    }
  }

  template <class Element>
  static bool run_packed(const AttentionTile* tile, char* scratch) {
    for (int head = 0; head < tile->num_kv_heads; ++head) {
      if (!AmxPacked<Element>(*tile, head, scratch).run()) return false;
    }
    return true;
  }

  static bool run_in_place_tiles(const AttentionTile* tile, char* scratch) {
    if (tile->codes.expand == nullptr) return attempt<Bfloat16>(tile, scratch);
    switch (tile->codes.type) {
      case kFloat8E4M3:
        return attempt<Float8>(tile, scratch);
      case kFloat8E5M2:
        return attempt<Float8E5M2>(tile, scratch);
      default:
        return attempt<int8_t>(tile, scratch);
    }
  }

  template <class Stored>
  static bool attempt(const AttentionTile* tile, char* scratch) {
    AmxInPlace<Stored> attempt(*tile, scratch);
    if (!attempt.run()) return false;
    if (attempt.finite()) return true;
    const AttentionTile other = precisely(tile);
    return run_others(without_in_place(tile), &other, scratch);
  }
};

/// float16 takes three products for one of float32: its speed is compared with float32, and it
/// needs more rows before tiles are faster than vectors. On a Xeon tiles with 16 rows of head
/// dimension 128 take 1.7 times as long as in bfloat16, where the vectors keep up with the memory
/// for 4 rows.
constexpr KernelTable amx_kernel_table(const char* name) {
  return kernel_table(
      name, attention_kernel<TileLoops<Bfloat16, Bfloat16Engine, 4>>(&tile_peak_flops),
      attention_kernel<TileLoops<Half, Float32Engine, 16>>(&peak_flops<Float32Engine>)
  );
}

}  // namespace
}  // namespace cpattn::kernels
