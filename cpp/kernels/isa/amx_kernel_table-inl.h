// SPDX-License-Identifier: Apache-2.0
#pragma once

// The kernels on AMX tiles, of hardware or twin. Needs the vector layer and the
// tiles included first.
#include "kernels/amx/attention-inl.h"
#include "kernels/isa/kernel_table-inl.h"

namespace cpattn::kernels {
namespace {

/// float16 is three products where float32 is one: its speed is measured against the
/// latter. Few rows are read in place without tiles, and widened: where there are
/// tiles, float32 is faster than the dot product of bfloat16.
constexpr KernelTable amx_kernel_table(const char* name) {
  return kernel_table(
      name,
      attention_kernel<Bfloat16, Float32Engine, 4, Float32Engine, AmxAttention<Bfloat16>>(
          &tile_peak_flops
      ),
      attention_kernel<Half, Float32Engine, 4, Float32Engine, AmxAttention<Half>>()
  );
}

}  // namespace
}  // namespace cpattn::kernels
