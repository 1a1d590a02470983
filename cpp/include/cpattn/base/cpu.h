// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace cpattn {

/// True when the processor has all of a level of the x86-64 ABI and the operating system saves the
/// registers. v3 has AVX2, FMA, BMI, F16C and more, v4 also AVX-512 F, BW, CD, DQ and VL.
bool has_x86_64_v3();
bool has_x86_64_v4();

/// True when the processor has AVX512_BF16 and AVX512_VNNI besides level v4. All functions here ask
/// CPUID: `__builtin_cpu_supports` asks the compiler's library, and some libraries answer no to
/// everything.
bool has_avx512_bf16();

/// True when the processor has AVX512_VBMI besides level v4.
bool has_avx512_vbmi();

/// True when Intel made the processor.
bool is_intel();

/// True when this process may use AMX tiles: the processor has AMX-TILE, -BF16
/// and -INT8, the kernel saves tile state and has granted this process the
/// permission that tiles need (the first call asks for it; it holds for all threads).
/// CPUID leaf 1DH is not read: some hypervisors pass AMX on but leave it empty.
bool amx_usable();

/// True when CPUID leaf 1DH lists no tile palette. oneDNN configures tiles from
/// that leaf, so where amx_usable() is true as well, its AMX kernels, and with them torch's
/// bfloat16 products, end in illegal instructions.
bool amx_palette_missing();

/// True when the processor has AVX512_FP16.
bool has_avx512_fp16();

/// True when the processor has FEAT_BF16 of Armv8 (BFDOT, BFMMLA and the conversions) and
/// FEAT_DotProd (SDOT), which every processor with FEAT_BF16 has.
bool has_arm_bf16();

}  // namespace cpattn
