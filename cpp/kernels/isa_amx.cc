// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_avx512-inl.h"
// The vector layer comes first.
#include "kernels/amx_tiles-inl.h"
// Then the tiles, then what is made of both.
#include "kernels/amx_attention-inl.h"

namespace cpattn::kernels {

extern const KernelTable table_amx = {
    .name = "amx",
    .attention =
        {
            attention_kernel<float, Float32Engine, 6>(),
            attention_kernel<Half, Float32Engine, 4>(),
            {&AmxAttention::scratch_bytes, &AmxAttention::run, &tile_peak_flops},
        },
    .weighted_sum = {&weighted_sum<float>, &weighted_sum<Half>, &weighted_sum<Bfloat16>},
};

}  // namespace cpattn::kernels
