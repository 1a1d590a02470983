// SPDX-License-Identifier: Apache-2.0
// Every code of e4m3fn on every instruction set, against its definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/vector/portable-inl.h"
#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

using kernels::Bfloat16;
using kernels::Float8;

/// Sign, four bits of exponent with bias 7, three of mantissa.
float value_of(int code) {
  const int exponent = code >> 3 & 15;
  const auto mantissa = static_cast<float>(code & 7);
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const float size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code < 0x80 ? size : -size;
}

uint16_t bfloat16_bits(float x) {
  Bfloat16 result{};
  kernels::narrow(x, &result);
  return result.bits;
}

/// Compares bits; NaN may be any.
void expect_bfloat16(uint16_t actual, float wanted, int code, float scale) {
  if (std::isnan(wanted)) {
    ASSERT_GT(actual & 0x7fff, 0x7f80) << code << " * " << scale;
  } else {
    ASSERT_EQ(actual, bfloat16_bits(wanted)) << code << " * " << scale;
  }
}

class Fp8 : public testing::EveryIsa {};

TEST_P(Fp8, EveryCodeIsExactInBfloat16) {
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  std::vector<uint16_t> result(256);
  active_sparse_kernels().rows.expand_codes(codes.data(), 256, result.data());
  for (int i = 0; i < 256; ++i) expect_bfloat16(result[i], value_of(i), i, 1);
}

TEST_P(Fp8, EveryCodeOfARowIsScaledAndRoundedToNearestEven) {
  const float infinity = std::numeric_limits<float>::infinity();
  float all_ones;
  std::memset(&all_ones, 0xff, sizeof all_ones);  // a NaN that rounding must not carry over
  const std::vector<float> scales = {1,         0.0F,   0x1.8p-20F, 1.2345678F, 0x1.01p0F,
                                     3e-39F,    1e-44F, 3e36F,      infinity,   all_ones,
                                     -all_ones, -0.3F,  0x1.03p0F,  7.7e-7F};
  for (int first = 0; first < 256; first += 128) {
    for (std::size_t s = 0; s + 4 <= scales.size(); ++s) {
      std::vector<char> row(kernels::kKvRowBytes + 1);
      char* const at = row.data() + 1;  // rows need no alignment
      for (int i = 0; i < 512; ++i) at[i] = static_cast<char>(first + i % 128);
      std::memcpy(at + 512, &scales[s], 16);
      for (int i = 0; i < 64; ++i) {
        const uint16_t bits = bfloat16_bits(static_cast<float>(i) - 31.5F);
        std::memcpy(at + 528 + i * 2, &bits, 2);
      }
      std::vector<uint16_t> narrow(576);
      std::vector<float> wide(576);
      active_sparse_kernels().rows.expand_kv_row(at, narrow.data());
      active_sparse_kernels().rows.expand_kv_row_float32(at, wide.data());
      for (int i = 0; i < 512; ++i) {
        const float scale = scales[s + i / 128];
        const int code = first + i % 128;
        const float wanted = value_of(code) * scale;
        expect_bfloat16(narrow[i], wanted, code, scale);
        if (std::isnan(wanted)) {
          ASSERT_TRUE(std::isnan(wide[i]));
        } else {
          ASSERT_EQ(wide[i], wanted);
        }
        if (HasFatalFailure()) return;
      }
      for (int i = 0; i < 64; ++i) {
        ASSERT_EQ(narrow[512 + i], bfloat16_bits(static_cast<float>(i) - 31.5F));
        ASSERT_EQ(wide[512 + i], static_cast<float>(i) - 31.5F);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Fp8, ::testing::ValuesIn(supported_isas()), testing::isa_test_name);

/// The code nearest to x, of two the even one, by search.
int nearest_code(float x) {
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double closer = std::fabs(std::fabs(x) - double{value_of(code)}) -
                          std::fabs(std::fabs(x) - double{value_of(best)});
    if (closer < 0 || (closer == 0 && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

TEST(PortableElements, Float8RoundsToTheNearestOfAllCodes) {
  const auto code_of = [](float x) {
    Float8 code{};
    kernels::narrow(x, &code);
    return int{code.bits};
  };
  const auto expect = [&](float x) { ASSERT_EQ(code_of(x), nearest_code(x)) << x; };
  for (int code = 0; code < 256; ++code) {
    const float x = value_of(code);
    if (std::isnan(x)) continue;
    const float next = (code & 0x7f) < 0x7e ? value_of(code + 1) : x;
    for (const float y : {x, (x + next) / 2}) {
      for (const float target : {-1e30F, y, 1e30F}) {
        ASSERT_NO_FATAL_FAILURE(expect(std::nextafter(y, target)));
      }
    }
  }
  for (const float x : {448.001F, -448.001F, 1e-40F, -1e-40F, -0.0F}) {
    ASSERT_NO_FATAL_FAILURE(expect(x));
  }
}

}  // namespace
}  // namespace cpattn
