// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/isa.h"

#include <atomic>
#include <cstdlib>
#include <string>

#include "base/printable.h"
#include "cpattn/base/check.h"
#include "cpattn/base/cpu.h"

namespace cpattn {
namespace {

constexpr std::string_view kNames[] = {"portable", "avx2", "avx512", "avx512bf16",
                                       "amx-twin", "amx",  "neon",   "neonbf16"};

std::vector<Isa> detect() {
  std::vector<Isa> isas = {Isa::portable};
#if defined(__x86_64__)
  [[maybe_unused]] const bool has_bf16 = has_avx512_bf16();
#ifdef CPATTN_HAVE_AMXTWIN
  if (has_bf16 && has_avx512_vbmi()) isas.push_back(Isa::amx_twin);
#endif
#ifdef CPATTN_HAVE_AVX2
  if (has_x86_64_v3()) isas.push_back(Isa::avx2);
#endif
#ifdef CPATTN_HAVE_AVX512
  if (has_x86_64_v4()) isas.push_back(Isa::avx512);
#endif
#ifdef CPATTN_HAVE_AVX512BF16
  if (has_bf16) {
    // Intel's processors are faster without these instructions.
    const bool is_slower = is_intel() && isas.back() == Isa::avx512;
    isas.insert(is_slower ? isas.end() - 1 : isas.end(), Isa::avx512bf16);
  }
#endif
#ifdef CPATTN_HAVE_AMX
  if (has_bf16 && has_avx512_vbmi() && amx_usable()) isas.push_back(Isa::amx);
#endif
#endif
#ifdef CPATTN_HAVE_NEON
  isas.push_back(Isa::neon);
#endif
#ifdef CPATTN_HAVE_NEONBF16
  if (has_arm_bf16()) isas.push_back(Isa::neonbf16);
#endif
  return isas;
}

Isa parse(std::string_view name, const char* source) {
  std::string valid;
  for (Isa isa : supported_isas()) {
    if (isa_name(isa) == name) return isa;
    valid += valid.empty() ? "" : ", ";
    valid += isa_name(isa);
  }
  throw std::invalid_argument(concat(
      source, ": '", printable(name),
      "' is not an instruction set this build and machine have; valid: ", valid
  ));
}

Isa initial() {
  const char* name = std::getenv("CPATTN_ISA");
  return name != nullptr && *name != '\0' ? parse(name, "CPATTN_ISA") : supported_isas().back();
}

std::atomic<int>& active() {
  static std::atomic<int> isa{static_cast<int>(initial())};
  return isa;
}

}  // namespace

std::vector<Isa> compiled_isas() {
  return {
      Isa::portable,
#ifdef CPATTN_HAVE_AVX2
      Isa::avx2,
#endif
#ifdef CPATTN_HAVE_AVX512
      Isa::avx512,
#endif
#ifdef CPATTN_HAVE_AVX512BF16
      Isa::avx512bf16,
#endif
#ifdef CPATTN_HAVE_AMXTWIN
      Isa::amx_twin,
#endif
#ifdef CPATTN_HAVE_AMX
      Isa::amx,
#endif
#ifdef CPATTN_HAVE_NEON
      Isa::neon,
#endif
#ifdef CPATTN_HAVE_NEONBF16
      Isa::neonbf16,
#endif
  };
}

std::string_view isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

void set_isa(std::string_view name) {
  active().store(static_cast<int>(parse(name, "set_isa")), std::memory_order_relaxed);
}

}  // namespace cpattn
