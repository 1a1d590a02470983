// SPDX-License-Identifier: Apache-2.0
#include "cpattn/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace cpattn {

#if defined(__x86_64__)
namespace {

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

/// All zeros for a leaf that the processor does not have.
CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

/// Which register states the operating system saves (XCR0).
uint64_t saved_states() {
  constexpr uint32_t kOsxsave = 1U << 27;
  if ((cpuid(1, 0).ecx & kOsxsave) == 0) return 0;
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

bool request_tile_permission() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

}  // namespace

bool amx_usable() {
  constexpr uint32_t kAmxBf16TileInt8 = 1U << 22 | 1U << 24 | 1U << 25;
  constexpr uint64_t kTileStates = uint64_t{3} << 17;
  static const bool usable = (cpuid(7, 0).edx & kAmxBf16TileInt8) == kAmxBf16TileInt8 &&
                             (saved_states() & kTileStates) == kTileStates &&
                             request_tile_permission();
  return usable;
}

bool amx_palette_missing() {
  // Subleaf 0 of 1DH: EAX is the highest palette number.
  return cpuid(0x1d, 0).eax == 0;
}

bool has_avx512_fp16() { return (cpuid(7, 0).edx & 1U << 23) != 0; }

#else

bool amx_usable() { return false; }
bool amx_palette_missing() { return true; }
bool has_avx512_fp16() { return false; }

#endif

}  // namespace cpattn
