// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#include <initializer_list>
#endif

#include "cpattn/base/system.h"

namespace cpattn {

#if defined(__x86_64__)
namespace {

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

/// Returns all zeros for a leaf that the processor does not have.
CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

/// The register states that the operating system saves (XCR0).
uint64_t saved_states() {
  constexpr uint32_t kOsxsave = 1U << 27;
  if ((cpuid(1, 0).ecx & kOsxsave) == 0) return 0;
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

constexpr uint32_t bits(std::initializer_list<int> positions) {
  uint32_t mask = 0;
  for (int position : positions) mask |= 1U << position;
  return mask;
}

bool has_all(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

}  // namespace

bool has_x86_64_v3() {
  constexpr uint32_t kFmaCx16MovbeOsxsaveAvxF16c = bits({12, 13, 22, 27, 28, 29});
  constexpr uint32_t kBmi1Avx2Bmi2 = bits({3, 5, 8});
  constexpr uint32_t kLzcnt = bits({5});
  constexpr uint32_t kXmmYmm = bits({1, 2});
  return has_all(cpuid(1, 0).ecx, kFmaCx16MovbeOsxsaveAvxF16c) &&
         has_all(cpuid(7, 0).ebx, kBmi1Avx2Bmi2) && has_all(cpuid(0x80000001, 0).ecx, kLzcnt) &&
         has_all(saved_states(), kXmmYmm);
}

bool has_x86_64_v4() {
  constexpr uint32_t kAvx512FDqCdBwVl = bits({16, 17, 28, 30, 31});
  constexpr uint32_t kMasksZmmLowZmmHigh = bits({5, 6, 7});
  return has_x86_64_v3() && has_all(cpuid(7, 0).ebx, kAvx512FDqCdBwVl) &&
         has_all(saved_states(), kMasksZmmLowZmmHigh);
}

bool has_avx512_bf16() {
  constexpr uint32_t kVnni = bits({11});
  constexpr uint32_t kBf16 = bits({5});
  return has_x86_64_v4() && has_all(cpuid(7, 0).ecx, kVnni) && has_all(cpuid(7, 1).eax, kBf16);
}

bool has_avx512_vbmi() {
  constexpr uint32_t kVbmi = bits({1});
  return has_x86_64_v4() && has_all(cpuid(7, 0).ecx, kVbmi);
}

bool is_intel() {
  constexpr uint32_t kGenu = 0x756e6547;
  constexpr uint32_t kIneI = 0x49656e69;
  constexpr uint32_t kNtel = 0x6c65746e;
  const CpuidRegisters vendor = cpuid(0, 0);
  return vendor.ebx == kGenu && vendor.edx == kIneI && vendor.ecx == kNtel;
}

bool amx_usable() {
  constexpr uint32_t kAmxBf16TileInt8 = bits({22, 24, 25});
  constexpr uint32_t kTileConfigTileData = bits({17, 18});
  static const bool usable = has_all(cpuid(7, 0).edx, kAmxBf16TileInt8) &&
                             has_all(saved_states(), kTileConfigTileData) &&
                             system::request_tiles();
  return usable;
}

bool amx_palette_missing() {
  // Subleaf 0 of 1DH: EAX is the highest palette number.
  return cpuid(0x1d, 0).eax == 0;
}

bool has_avx512_fp16() { return has_all(cpuid(7, 0).edx, bits({23})); }

#else

bool has_x86_64_v3() { return false; }
bool has_x86_64_v4() { return false; }
bool has_avx512_bf16() { return false; }
bool has_avx512_vbmi() { return false; }
bool is_intel() { return false; }
bool amx_usable() { return false; }
bool amx_palette_missing() { return true; }
bool has_avx512_fp16() { return false; }

#endif

bool has_arm_bf16() { return system::has_arm_bf16(); }

}  // namespace cpattn
