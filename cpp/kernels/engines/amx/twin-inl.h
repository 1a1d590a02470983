// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of tiles-inl.h without AMX, with the bits of the hardware, so that code written
// with tiles is tested on machines without AMX.
#include <immintrin.h>
#include <stdint.h>

namespace cpattn::kernels {
namespace {

/// The tile registers of a thread. Outside a TileScope any use of them is an illegal instruction,
/// as on the hardware.
struct TileRegisters {
  bool configured;
  uint8_t rows[8][16][64];
};
thread_local TileRegisters tile_registers;

class TileScope {
 public:
  TileScope() { configure(); }
  ~TileScope() { tile_registers.configured = false; }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  void configure() const {
    __builtin_memset(&tile_registers, 0, sizeof tile_registers);
    tile_registers.configured = true;
  }
};

inline uint8_t* tile_bytes(int tile) {
  if (!tile_registers.configured) __builtin_trap();
  return &tile_registers.rows[tile][0][0];
}

template <int kTile>
inline void load_tile(const void* from) {
  __builtin_memcpy(tile_bytes(kTile), from, 1024);
}

template <int kTile>
inline void load_tile_rows(const void* from, int64_t row_bytes) {
  uint8_t* to = tile_bytes(kTile);
  for (int row = 0; row < 16; ++row) {
    __builtin_memcpy(to + int64_t{64} * row, static_cast<const char*>(from) + row * row_bytes, 64);
  }
}

template <int kTile>
inline void store_tile(void* to) {
  __builtin_memcpy(to, tile_bytes(kTile), 1024);
}

template <int kTile>
inline void clear_tile() {
  __builtin_memset(tile_bytes(kTile), 0, 1024);
}

/// The even (0) or odd (1) bfloat16 of a pair.
inline float element_of_pair(uint32_t pair, int which) {
  const uint32_t bits = which == 0 ? pair << 16 : pair & 0xffff0000U;
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

/// tdpbf16ps sums the products of the even elements by FMA from zero, then those
/// of the odd ones from zero, and adds both to the sum in this order.
inline void multiply_tile_rows(float* sum, const uint8_t* left_row, const uint8_t* right) {
  float even[16] = {};
  float odd[16] = {};
  uint32_t left[16];
  uint32_t columns[16];
  __builtin_memcpy(left, left_row, sizeof left);
  for (int k = 0; k < 16; ++k) {
    __builtin_memcpy(columns, right + int64_t{64} * k, sizeof columns);
    const float left_even = element_of_pair(left[k], 0);
    const float left_odd = element_of_pair(left[k], 1);
    for (int n = 0; n < 16; ++n) {
      even[n] = __builtin_fmaf(left_even, element_of_pair(columns[n], 0), even[n]);
      odd[n] = __builtin_fmaf(left_odd, element_of_pair(columns[n], 1), odd[n]);
    }
  }
  for (int n = 0; n < 16; ++n) sum[n] = (even[n] + odd[n]) + sum[n];
}

template <int kSum, int kLeft, int kRight>
inline void multiply_tiles() {
  // Tiles ignore MXCSR: they round to nearest even, take subnormal inputs for zero and flush
  // subnormal results. Compilers do not know that the two writes matter to arithmetic, which must
  // stay between them.
  constexpr unsigned kFlushSubnormalsMaskAll = 0x9fc0;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kFlushSubnormalsMaskAll);
  __asm__ volatile("" : : : "memory");
  for (int m = 0; m < 16; ++m) {
    float sum[16];
    uint8_t* const row = tile_bytes(kSum) + int64_t{64} * m;
    __builtin_memcpy(sum, row, sizeof sum);
    multiply_tile_rows(sum, tile_bytes(kLeft) + int64_t{64} * m, tile_bytes(kRight));
    __builtin_memcpy(row, sum, sizeof sum);
  }
  __asm__ volatile("" : : : "memory");
  _mm_setcsr(before);
}

template <int kSum, int kLeft, int kRight>
inline void multiply_int8_tiles() {
  const uint8_t* const left = tile_bytes(kLeft);
  const uint8_t* const right = tile_bytes(kRight);
  uint8_t* const sums = tile_bytes(kSum);
  for (int m = 0; m < 16; ++m) {
    uint32_t sum[16];  // unsigned, because it may wrap
    __builtin_memcpy(sum, sums + m * 64, sizeof sum);
    for (int k = 0; k < 64; ++k) {
      const auto factor = static_cast<int8_t>(left[m * 64 + k]);
      const uint8_t* const row = right + k / 4 * 64 + k % 4;
      for (int n = 0; n < 16; ++n) {
        sum[n] += static_cast<uint32_t>(factor * static_cast<int8_t>(row[n * 4]));
      }
    }
    __builtin_memcpy(sums + m * 64, sum, sizeof sum);
  }
}

}  // namespace
}  // namespace cpattn::kernels
