// SPDX-License-Identifier: Apache-2.0
#pragma once

// The AMX instructions that the kernels use. Every tile is whole: 16 rows of 64
// bytes, contiguous in memory unless stated otherwise: 16 x 32 bfloat16, 16 x 64 int8 or 16 x 16
// float32 or int32. twin-inl.h has the same functions in plain C++; include one of the two.
//
// The functions are in assembly because the compilers' intrinsics want literal register numbers
// and, in GCC 12, do not tell the compiler which memory they touch.
#include <stdint.h>

namespace cpattn::kernels {
namespace {

/// Configures the tiles, all zero, for its lifetime. Its destructor releases the thread's tile
/// state, so that other AMX code configures its own.
class TileScope {
 public:
  TileScope() { configure(); }
  ~TileScope() { __asm__ volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  /// Configures the tiles again, all zero, after other code of this thread may have used them.
  void configure() const {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
};

template <int kTile>
inline void load_tile(const void* from) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(int64_t{64}), "i"(kTile)
                   : "memory");
}

/// Loads a tile from rows that are `row_bytes` apart.
template <int kTile>
inline void load_tile_rows(const void* from, int64_t row_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2"
                   :
                   : "r"(from), "r"(row_bytes), "i"(kTile)
                   : "memory");
}

template <int kTile>
inline void store_tile(void* to) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)"
                   :
                   : "r"(to), "r"(int64_t{64}), "i"(kTile)
                   : "memory");
}

template <int kTile>
inline void clear_tile() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

/// sum[m][n] += left[m][2k] right[k][2n] + left[m][2k + 1] right[k][2n + 1] over
/// the 16 pairs k; sum in float32, left and right in bfloat16.
template <int kSum, int kLeft, int kRight>
inline void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

/// sum[m][n] += left[m][4k + i] right[k][4n + i] over the 16 fours k and i < 4; sum
/// in int32, where it wraps, left and right in int8.
template <int kSum, int kLeft, int kRight>
inline void multiply_int8_tiles() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kLeft), "i"(kRight));
}

}  // namespace
}  // namespace cpattn::kernels
