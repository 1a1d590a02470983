// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_avx512-inl.h"
// The vector layer comes first.
#include "kernels/gemm_bf16-inl.h"
// Then the engines, then the loop over them.
#include "kernels/attention-inl.h"
// Then the tiles in plain C++.
#include "kernels/amx_twin-inl.h"
// Then what is made of them.
#include "kernels/amx_pack-inl.h"
#include "kernels/amx_products-inl.h"
#include "kernels/amx_softmax-inl.h"
// Last.
#include "kernels/amx_attention-inl.h"

namespace cpattn::kernels {

extern const KernelTable table_amxtwin = {
    .name = "amx-twin",
    .attention =
        {
            attention_kernel<float, Float32Engine, 6>(),
            attention_kernel<Half, Float32Engine, 4>(),
            {&AmxAttention::scratch_bytes, &AmxAttention::run, &tile_peak_flops},
        },
    .weighted_sum = {&weighted_sum<float>, &weighted_sum<Half>, &weighted_sum<Bfloat16>},
};

}  // namespace cpattn::kernels
