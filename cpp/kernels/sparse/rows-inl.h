// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels of rows_kernel.h. Needs the vector layer included first.
#include "kernels/boundary/rows_kernel.h"
#include "kernels/sparse/rows_norm-inl.h"
#include "kernels/sparse/rows_quantize-inl.h"
#include "kernels/vector/fp8-inl.h"

namespace cpattn::kernels {
namespace {

/// The codes of a row of the FP8 cache as T, and then its other numbers.
template <class T>
void expand_kv_codes(const char* row, T* out) {
  const auto* codes = reinterpret_cast<const Float8*>(row);
  for (int64_t i = 0; i < kKvCodes; i += kKvGroup) {
    float scale;
    __builtin_memcpy(&scale, row + kKvCodes + i / kKvGroup * 4, sizeof scale);
    expand_row(codes + i, kKvGroup, scale, out + i);
  }
}

inline void expand_kv_row(const void* row, void* out) {
  const char* bytes = static_cast<const char*>(row);
  auto* to = static_cast<Bfloat16*>(out);
  expand_kv_codes(bytes, to);
  __builtin_memcpy(to + kKvCodes, bytes + kKvCodeBytes, kKvRope * sizeof(Bfloat16));
}

inline void expand_kv_row_float32(const void* row, float* out) {
  const char* bytes = static_cast<const char*>(row);
  expand_kv_codes(bytes, out);
  Bfloat16 rope[kKvRope];  // in the row it need not be aligned
  __builtin_memcpy(rope, bytes + kKvCodeBytes, sizeof rope);
  for (int64_t i = 0; i < kKvRope; i += kLanes) store(out + kKvCodes + i, load(rope + i));
}

inline void expand_codes(const void* codes, int64_t n, void* out) {
  expand_row(static_cast<const Float8*>(codes), n, static_cast<Bfloat16*>(out));
}

constexpr RowKernels row_kernels() {
  return {
      .quantize_kv_row =
          {&quantize_kv_row<float>, &quantize_kv_row<Half>, &quantize_kv_row<Bfloat16>},
      .quantize_groups =
          {&quantize_groups<float>, &quantize_groups<Half>, &quantize_groups<Bfloat16>},
      .hadamard = {&hadamard<float>, &hadamard<Half>, &hadamard<Bfloat16>},
      .rms_norm = {&rms_norm<float>, &rms_norm<Half>, &rms_norm<Bfloat16>},
      .dequantize_int8 =
          {&dequantize_int8<float>, &dequantize_int8<Half>, &dequantize_int8<Bfloat16>},
      .widen = {&widen_row<float>, &widen_row<Half>, &widen_row<Bfloat16>},
      .expand_kv_row = &expand_kv_row,
      .expand_kv_row_float32 = &expand_kv_row_float32,
      .expand_codes = &expand_codes,
  };
}

}  // namespace
}  // namespace cpattn::kernels
