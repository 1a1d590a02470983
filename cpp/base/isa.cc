// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "base/printable.h"
#include "cpattn/base/check.h"
#include "cpattn/base/cpu.h"

namespace cpattn {
namespace {

/// An instruction set that was compiled in.
struct CompiledSet {
  Isa isa;
  bool (*runs_here)();
};

bool always() { return true; }

/// All compiled instruction sets, slowest first.
constexpr CompiledSet kCompiledSets[] = {
    {Isa::portable, always},
#ifdef CPATTN_HAVE_AMXTWIN
    {Isa::amx_twin, [] { return has_avx512_bf16() && has_avx512_vbmi(); }},
#endif
#ifdef CPATTN_HAVE_AVX2
    {Isa::avx2, has_x86_64_v3},
#endif
#ifdef CPATTN_HAVE_AVX512
    {Isa::avx512, has_x86_64_v4},
#endif
#ifdef CPATTN_HAVE_AVX512BF16
    {Isa::avx512bf16, has_avx512_bf16},
#endif
#ifdef CPATTN_HAVE_AMX
    {Isa::amx, [] { return has_avx512_bf16() && has_avx512_vbmi() && amx_usable(); }},
#endif
#ifdef CPATTN_HAVE_NEON
    {Isa::neon, always},
#endif
#ifdef CPATTN_HAVE_NEONBF16
    {Isa::neonbf16, has_arm_bf16},
#endif
};

std::vector<Isa> detect() {
  std::vector<Isa> isas;
  for (const CompiledSet& set : kCompiledSets) {
    if (!set.runs_here()) continue;
    // Intel's processors are faster without the instructions for bfloat16.
    const bool is_slower = set.isa == Isa::avx512bf16 && is_intel() && isas.back() == Isa::avx512;
    isas.insert(is_slower ? isas.end() - 1 : isas.end(), set.isa);
  }
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
  std::vector<Isa> isas;
  for (const CompiledSet& set : kCompiledSets) isas.push_back(set.isa);
  std::sort(isas.begin(), isas.end());
  return isas;
}

std::string_view isa_name(Isa isa) {
  constexpr std::string_view kNames[] = {"portable", "avx2", "avx512", "avx512bf16",
                                         "amx-twin", "amx",  "neon",   "neonbf16"};
  return kNames[static_cast<int>(isa)];
}

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa active_isa() { return static_cast<Isa>(active().load(std::memory_order_relaxed)); }

void set_isa(std::string_view name) {
  active().store(static_cast<int>(parse(name, "set_isa")), std::memory_order_relaxed);
}

}  // namespace cpattn
