// SPDX-License-Identifier: Apache-2.0
#include "kernels/vector_avx512-inl.h"
// The vector layer comes first.
#include "kernels/gemm-inl.h"
// Then the engines, then the loop over them.
#include "kernels/attention-inl.h"

namespace cpattn::kernels {

extern const KernelTable table_avx512 = {
    .name = "avx512",
    .attention =
        {
            attention_kernel<float, Float32Engine, 6>(),
            attention_kernel<Half, Float32Engine, 4>(),
            attention_kernel<Bfloat16, Float32Engine, 4>(),
        },
    .weighted_sum = {&weighted_sum<float>, &weighted_sum<Half>, &weighted_sum<Bfloat16>},
};

}  // namespace cpattn::kernels
