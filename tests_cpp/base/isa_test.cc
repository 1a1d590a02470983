// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/isa.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cpattn/base/cpu.h"

namespace cpattn {
namespace {

TEST(Isa, PortableIsAlwaysThereAndFirst) {
  ASSERT_FALSE(supported_isas().empty());
  EXPECT_EQ(supported_isas().front(), Isa::portable);
}

TEST(Isa, WhatRunsHereWasCompiled) {
  const std::vector<Isa> compiled = compiled_isas();
  for (Isa isa : supported_isas()) {
    EXPECT_EQ(std::count(compiled.begin(), compiled.end(), isa), 1) << isa_name(isa);
  }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)  // clang 14 has no such names
TEST(Isa, LevelsOfTheAbiAreWhatTheCompilerSees) {
  EXPECT_EQ(has_x86_64_v3(), __builtin_cpu_supports("x86-64-v3") != 0);
  EXPECT_EQ(has_x86_64_v4(), __builtin_cpu_supports("x86-64-v4") != 0);
}

TEST(Isa, ProcessorsAreWhatTheCompilerSees) {
  EXPECT_EQ(
      has_avx512_bf16(),
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")
  );
  EXPECT_EQ(is_intel(), __builtin_cpu_is("intel") != 0);
}
#endif

#if defined(__aarch64__)
TEST(Isa, NeonIsAlwaysThereOnArm) {
  const std::vector<Isa>& isas = supported_isas();
  ASSERT_GE(isas.size(), 2U);
  EXPECT_EQ(isas[1], Isa::neon);
}
#endif

TEST(Isa, AmxIsTheDefaultWhereItCanBeUsedAndItsTwinNowhere) {
  EXPECT_NE(supported_isas().back(), Isa::amx_twin);
#ifdef CPATTN_HAVE_AMX
  EXPECT_EQ(supported_isas().back() == Isa::amx, amx_usable());
#endif
}

TEST(Isa, EverySupportedNameCanBeForced) {
  const Isa before = active_isa();
  for (Isa isa : supported_isas()) {
    set_isa(isa_name(isa));
    EXPECT_EQ(active_isa(), isa);
  }
  set_isa(isa_name(before));
}

TEST(Isa, AnUnknownNameIsRefusedWithTheValidOnes) {
  try {
    set_isa("sse9");
    FAIL();
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'sse9'"), std::string::npos);
    for (Isa isa : supported_isas()) EXPECT_NE(text.find(isa_name(isa)), std::string::npos);
  }
}

}  // namespace
}  // namespace cpattn
