// SPDX-License-Identifier: Apache-2.0
#pragma once

// The loop that reads K and V of codes in place. Needs the vector layer and the engines included
// first.
#include "kernels/attention/in_place-inl.h"
#include "kernels/softmax/results-inl.h"

namespace cpattn::kernels {
namespace {

/// Reads K and V that are codes, with queries of type T, in float32. It writes the results of a
/// part, which merge_parts() turns into T.
template <class T, class Code>
class InPlaceCodes {
  /// The loop computes in float32, with its exponential.
  using Loop = InPlaceLoop<float, Float32Engine, 6, 1, Code>;

  struct Workspace {
    float* q;        // [tokens][heads][nope_dim]
    float* q_rope;   // [tokens][heads][rope_dim]
    float* partial;  // as TileResults::partial
    char* loop;
    int64_t bytes;

    Workspace(char* base, const AttentionTile& tile) {
      const int64_t rows = int64_t{tile.num_kv_heads} * tile.num_tokens * tile.group;
      Carver carver{base};
      carver.take(q, rows * tile.nope_dim);
      carver.take(q_rope, rows * tile.rope_dim);
      carver.take(partial, rows * (tile.v_head_dim + kPartialStateFloats));
      carver.take(loop, Loop::scratch_bytes(&tile));
      bytes = carver.used;
    }
  };

 public:
  static int64_t scratch_bytes(const AttentionTile* tile) {
    return Workspace(nullptr, *tile).bytes;
  }

  static bool run(const AttentionTile* tile, void* scratch) {
    const Workspace work(static_cast<char*>(scratch), *tile);
    AttentionTile wide = *tile;
    const int64_t heads = int64_t{tile->num_kv_heads} * tile->group;
    const auto widen = [&](HeadRows<const void>& q, int stored, int dim, float* to) {
      T copy[kMaxHeadDim];
      const PaddedRows rows(*tile, stored, dim, sizeof(T), reinterpret_cast<char*>(copy));
      for (int64_t token = 0; token < tile->num_tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
          const auto* from = row_at<const T>(q, token, head);
          const char* read = rows.read(reinterpret_cast<const char*>(from), 0);
          const T* source = reinterpret_cast<const T*>(read);
          float* row = to + (token * heads + head) * dim;
          for (int d = 0; d < dim; d += kLanes) store(row + d, load(source + d));
        }
      }
      q = {to, heads * dim, dim};
    };
    widen(wide.q, tile->stored.nope_dim, tile->nope_dim, work.q);
    if (tile->rope_dim > 0) widen(wide.q_rope, tile->stored.rope_dim, tile->rope_dim, work.q_rope);
    if (tile->results.partial == nullptr) wide.results.partial = work.partial;
    if (!Loop::run(&wide, work.loop)) return false;
    if (tile->results.partial == nullptr) merge_parts<T>(tile, work.partial, 1);
    return true;
  }
};

/// Runs the loop for K and V of codes: with operands of 16 bits, if Loops has them, or in float32.
template <class Loops, int kParts, class Code>
bool run_in_place_codes(const AttentionTile* tile, void* scratch) {
  if constexpr (Loops::kShortOperands) {
    // Weights that were rounded are not multiplied by factors, which would round them again.
    return has_factors(tile->codes.v_factors)
               ? Loops::template InPlace<Loops::kPreciseParts, Code>::run(tile, scratch)
               : Loops::template InPlace<kParts, Code>::run(tile, scratch);
  } else {
    return InPlaceCodes<typename Loops::Element, Code>::run(tile, scratch);
  }
}

/// Runs the loop for the type of K and V.
template <class Loops, int kParts>
bool run_in_place(const AttentionTile* tile, void* scratch) {
  using T = typename Loops::Element;
  if (tile->codes.expand == nullptr) {
    return Loops::template InPlace<kParts, T>::run(tile, scratch);
  }
  switch (tile->codes.type) {
    case kFloat8E4M3:
      return run_in_place_codes<Loops, kParts, Float8>(tile, scratch);
    case kFloat8E5M2:
      return run_in_place_codes<Loops, kParts, Float8E5M2>(tile, scratch);
    default:
      return run_in_place_codes<Loops, kParts, int8_t>(tile, scratch);
  }
}

/// Scratch of the loop for the type of K and V, with most parts.
template <class Loops>
int64_t in_place_scratch_bytes(const AttentionTile* tile) {
  using T = typename Loops::Element;
  return tile->codes.expand == nullptr || Loops::kShortOperands
             ? Loops::template InPlace<Loops::kPreciseParts, T>::scratch_bytes(tile)
             : InPlaceCodes<T, int8_t>::scratch_bytes(tile);
}

}  // namespace
}  // namespace cpattn::kernels
