// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

namespace cpattn {

/// Instruction sets with kernels of their own.
///
/// amx_twin runs the kernels of amx bit for bit, with the tile instructions in
/// plain C++: slow, and in test builds (CPATTN_AMX_TWIN) only.
enum class Isa { portable, avx2, avx512, avx512bf16, amx_twin, amx, neon, neonbf16 };

/// The name that CPATTN_ISA takes, such as "amx-twin".
std::string_view isa_name(Isa isa);

/// The instruction sets that this build has kernels for, including sets that this machine cannot
/// run.
std::vector<Isa> compiled_isas();

/// The compiled_isas() that this machine can run, slowest first.
/// The order is by speed, not by feature: vdpbf16ps runs at twice the float32
/// rate on AMD and at half of it on Intel, where avx512 therefore comes after avx512bf16.
/// amx comes last because a prototype of its kernels reached 40 % of 2350 GFLOP/s a core on Emerald
/// Rapids, where float32 has at most 176. The twin proves the kernels themselves bit for bit.
const std::vector<Isa>& supported_isas();

/// The instruction set in use: the last of supported_isas(), unless the
/// environment variable CPATTN_ISA (read once) or set_isa() names another.
/// Throws std::invalid_argument when CPATTN_ISA names no supported one.
Isa active_isa();

/// Forces an instruction set for the whole process; for tests. Throws
/// std::invalid_argument with the list of valid names.
void set_isa(std::string_view name);

}  // namespace cpattn
