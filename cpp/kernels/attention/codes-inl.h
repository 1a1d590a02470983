// SPDX-License-Identifier: Apache-2.0
#pragma once

// K and V that are stored as codes of 8 bits. Needs the vector layer and the engines included
// first.
#include "kernels/attention/decode-inl.h"
#include "kernels/attention/results-inl.h"
#include "kernels/vector/fp8-inl.h"

namespace cpattn::kernels {
namespace {

inline int expand_quickly(const void* /*codes*/, int /*dim*/, void* /*out*/) { return 0; }
inline int expand_quickly(const Float8* codes, int dim, Bfloat16* out) {
  const int quick = dim / kCodes * kCodes;
  expand_row(codes, quick, out);
  return quick;
}

/// Expands codes times a factor, as far as there is a faster way than one vector after the other;
/// returns how many of `dim` it has expanded.
template <class T, class Code>
int expand_scaled_quickly(const Code* /*codes*/, int /*dim*/, Vector /*factor*/, T* /*out*/) {
  return 0;
}
#if defined(__AVX512BF16__)
template <class Code>
int expand_scaled_quickly(const Code* codes, int dim, Vector factor, Bfloat16* out) {
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Vector first;
    Vector second;
    load_two(codes + d, first, second);
    const __m512bh rounded = _mm512_cvtne2ps_pbh(mul(second, factor), mul(first, factor));
    _mm512_storeu_si512(out + d, reinterpret_cast<__m512i>(rounded));
  }
  return d;
}
#endif

/// AttentionKernel::expand_codes.
template <class T, class Code>
void expand_codes(const char* const* rows, int n, int dim, const float* factors, void* elements) {
  T* out = static_cast<T*>(elements);
  for (int i = 0; i < n; ++i, out += dim) {
    const Code* codes = reinterpret_cast<const Code*>(rows[i]);
    if (factors != nullptr) {
      const Vector factor = splat(factors[i]);
      for (int d = expand_scaled_quickly(codes, dim, factor, out); d < dim; d += kLanes) {
        store(out + d, mul(load(codes + d), factor));
      }
      continue;
    }
    for (int d = expand_quickly(codes, dim, out); d < dim; d += kLanes) {
      store(out + d, load(codes + d));
    }
  }
}

/// Decoding of K and V that are codes, with queries of type T: in float32, so that there is one
/// loop for each type of codes. Its results go through those of a part, from which merge_parts()
/// makes those of T.
template <class T, class Code>
class CodeDecoder {
  /// The loop computes in float32, and so with the exponential of float32.
  using Loop = DecodeLoop<float, Float32Engine, 6, Code>;

  struct Workspace {
    float* q;        // [tokens][heads][nope_dim]
    float* q_rope;   // [tokens][heads][rope_dim]
    float* partial;  // as AttentionTile::partial
    char* loop;
    int64_t bytes;

    Workspace(char* base, const AttentionTile& tile) {
      const int64_t rows = int64_t{tile.num_kv_heads} * tile.num_tokens * tile.group;
      Carver carver{base};
      carver.take(q, rows * tile.nope_dim);
      carver.take(q_rope, rows * tile.rope_dim);
      carver.take(partial, rows * (tile.v_head_dim + kPartialState));
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
    const auto widen = [&](const void*& q, int64_t& token_stride, int64_t& head_stride, int stored,
                           int dim, float* to) {
      T copy[kMaxHeadDim];
      const PaddedRows rows(*tile, stored, dim, sizeof(T), reinterpret_cast<char*>(copy));
      for (int64_t token = 0; token < tile->num_tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
          const T* from = static_cast<const T*>(q) + token * token_stride + head * head_stride;
          const char* read = rows.read(reinterpret_cast<const char*>(from), 0);
          const T* source = reinterpret_cast<const T*>(read);
          float* row = to + (token * heads + head) * dim;
          for (int d = 0; d < dim; d += kLanes) store(row + d, load(source + d));
        }
      }
      q = to;
      token_stride = heads * dim;
      head_stride = dim;
    };
    widen(
        wide.q, wide.q_token_stride, wide.q_head_stride, tile->stored.nope_dim, tile->nope_dim,
        work.q
    );
    if (tile->rope_dim > 0) {
      widen(
          wide.q_rope, wide.q_rope_token_stride, wide.q_rope_head_stride, tile->stored.rope_dim,
          tile->rope_dim, work.q_rope
      );
    }
    if (tile->partial == nullptr) wide.partial = work.partial;
    if (!Loop::run(&wide, work.loop)) return false;
    if (tile->partial == nullptr) merge_parts<T>(tile, work.partial, 1);
    return true;
  }
};

}  // namespace
}  // namespace cpattn::kernels
