// SPDX-License-Identifier: Apache-2.0
// Kernels that bring rows into a cache, on buffers without a byte to spare.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/vector/portable-inl.h"
#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

using kernels::Bfloat16;
using kernels::Float8;
using kernels::Float8E5M2;
using kernels::Half;
using kernels::kFloat32;
using testing::random_floats;

template <class Code>
float code_value(int code) {
  return kernels::widen(Code{static_cast<uint8_t>(code)});
}

/// x / 1 as a code, by the definition in scatter_kernel.h.
uint8_t code_of(float x, Float8 code) {
  kernels::narrow(std::isnan(x) ? -480.0F : std::clamp(x, -448.0F, 448.0F), &code);
  return code.bits;
}
uint8_t code_of(float x, Float8E5M2 code) {
  kernels::narrow(std::isfinite(x) ? std::clamp(x, -57344.0F, 57344.0F) : x, &code);
  return code.bits;
}
uint8_t code_of(float x, int8_t /*code*/) {
  if (std::isnan(x)) return 0x80;
  return static_cast<uint8_t>(std::lrint(std::clamp(x, -127.0F, 127.0F)));
}
bool is_nan(uint8_t bits, Float8 /*code*/) { return (bits & 0x7f) == 0x7f; }
bool is_nan(uint8_t bits, Float8E5M2 /*code*/) { return (bits & 0x7f) > 0x7c; }
bool is_nan(uint8_t bits, int8_t /*code*/) { return bits == 0x80; }

class ScatterKernel : public testing::EveryIsa {
 protected:
  const kernels::ScatterKernels& scatter() const { return active_sparse_kernels().scatter; }

  template <class Code>
  std::vector<Code> cast(const std::vector<float>& x, int32_t type, float scale) const {
    std::vector<Code> out(x.size());
    scatter().cast[kFloat32][type](x.data(), static_cast<int64_t>(x.size()), scale, out.data());
    return out;
  }
};

TEST_P(ScatterKernel, CastsOfEveryLength) {
  for (int64_t n = 1; n <= 70; ++n) {
    const std::vector<float> x = random_floats(n, 1);
    for (float scale : {1.0F, 0.37F}) {
      const auto same = cast<float>(x, kernels::kFloat32, scale);
      const auto half = cast<Half>(x, kernels::kFloat16, scale);
      const auto bfloat16 = cast<Bfloat16>(x, kernels::kBfloat16, scale);
      const auto float8 = cast<Float8>(x, kernels::kCastFloat8, scale);
      const auto e5m2 = cast<Float8E5M2>(x, kernels::kCastFloat8E5M2, scale);
      const auto int8 = cast<int8_t>(x, kernels::kCastInt8, scale / 50);
      for (int64_t i = 0; i < n; ++i) {
        const float wanted = x[i] / scale;
        ASSERT_EQ(same[i], wanted);
        Half wanted_half{};
        Bfloat16 wanted_bfloat16{};
        Float8 wanted_float8{};
        kernels::narrow(wanted, &wanted_half);
        kernels::narrow(wanted, &wanted_bfloat16);
        kernels::narrow(wanted, &wanted_float8);
        ASSERT_EQ(half[i].bits, wanted_half.bits) << i << " of " << n;
        ASSERT_EQ(bfloat16[i].bits, wanted_bfloat16.bits) << i << " of " << n;
        ASSERT_EQ(float8[i].bits, wanted_float8.bits) << i << " of " << n;
        ASSERT_EQ(e5m2[i].bits, code_of(wanted, e5m2[i])) << i << " of " << n;
        ASSERT_EQ(static_cast<uint8_t>(int8[i]), code_of(x[i] / (scale / 50), int8[i]));
      }
    }
  }
}

template <class Code>
void expect_every_bfloat16(const kernels::ScatterKernels& scatter, int32_t type) {
  std::vector<Bfloat16> x(1 << 16);
  for (std::size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<uint16_t>(i);
  std::vector<Code> out(x.size());
  scatter.cast[kernels::kBfloat16][type](x.data(), static_cast<int64_t>(x.size()), 1, out.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = kernels::widen(x[i]);
    uint8_t bits;
    std::memcpy(&bits, &out[i], 1);
    if (std::isnan(value)) {
      ASSERT_TRUE(is_nan(bits, out[i])) << i;
    } else {
      ASSERT_EQ(bits, code_of(value, out[i])) << i;
    }
  }
}

TEST_P(ScatterKernel, EveryBfloat16AsACode) {
  expect_every_bfloat16<Float8>(scatter(), kernels::kCastFloat8);
  expect_every_bfloat16<Float8E5M2>(scatter(), kernels::kCastFloat8E5M2);
  expect_every_bfloat16<int8_t>(scatter(), kernels::kCastInt8);
}

/// Numbers at and right beside every number that lies in the middle of two codes.
template <class Code>
std::vector<float> ties(int largest) {
  std::vector<float> x;
  for (int code = 0; code < largest; ++code) {
    const float middle = (code_value<Code>(code) + code_value<Code>(code + 1)) / 2;
    for (float value : {middle, code_value<Code>(code)}) {
      for (float beside : {-1.0F, 1.0F}) {
        x.insert(x.end(), {value, std::nextafter(value, 1e9F * beside), -value});
        x.push_back(value * (1 + beside * 0x1p-12F));  // lost to float16
      }
    }
  }
  x.insert(x.end(), {1e-45F, 1e-30F, 61439, 61440, 65504, 1.7e7F, 3e38F, INFINITY, -INFINITY});
  return x;
}

TEST_P(ScatterKernel, TiesOfCodesAndTheirNeighbours) {
  std::vector<float> x = ties<Float8>(0x7e);
  const auto float8 = cast<Float8>(x, kernels::kCastFloat8, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(float8[i].bits, code_of(x[i], float8[i])) << x[i];
  }
  x = ties<Float8E5M2>(0x7b);
  const auto e5m2 = cast<Float8E5M2>(x, kernels::kCastFloat8E5M2, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(e5m2[i].bits, code_of(x[i], e5m2[i])) << x[i];
  }
  x.clear();
  for (int twice = -300; twice <= 300; ++twice) x.push_back(static_cast<float>(twice) / 2);
  const auto int8 = cast<int8_t>(x, kernels::kCastInt8, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(static_cast<uint8_t>(int8[i]), code_of(x[i], int8[i])) << x[i];
  }
}

TEST_P(ScatterKernel, TheLargestOfEveryLengthAndNothingBehindIt) {
  for (int64_t n = 1; n <= 70; ++n) {
    std::vector<float> x = random_floats(n, 2);
    const auto largest = [&] { return scatter().largest[kFloat32](x.data(), n); };
    for (int64_t i = 0; i < n; ++i) {
      const float kept = x[i];
      for (float size : {900.0F, -900.0F}) {
        x[i] = size;
        ASSERT_EQ(largest(), 900) << i << " of " << n;
      }
      for (float poison : {NAN, INFINITY, -INFINITY}) {
        x[i] = poison;
        ASSERT_TRUE(std::isnan(largest())) << i << " of " << n;
      }
      x[i] = kept;
    }
  }
  std::vector<Half> half(9, Half{0xc000});
  std::vector<Bfloat16> bfloat16(9, Bfloat16{0xc000});
  EXPECT_EQ(scatter().largest[kernels::kFloat16](half.data(), 9), 2);
  EXPECT_EQ(scatter().largest[kernels::kBfloat16](bfloat16.data(), 9), 2);
}

TEST_P(ScatterKernel, StreamedBytesArriveAndNoOthers) {
  constexpr int64_t kLine = kernels::kStreamBytes;
  std::vector<char> from(5 * kLine + 3);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  alignas(kernels::kStreamBytes) char to[7 * kLine];
  for (int64_t bytes = 0; bytes <= 5 * kLine; bytes += kLine) {
    std::memset(to, 0x55, sizeof to);
    scatter().stream(from.data() + 3, bytes, to + kLine);
    scatter().finish_stream();
    EXPECT_EQ(std::memcmp(to + kLine, from.data() + 3, bytes), 0);
    const auto untouched = [](char c) { return c == 0x55; };
    EXPECT_TRUE(std::all_of(to, to + kLine, untouched));
    EXPECT_TRUE(std::all_of(to + kLine + bytes, to + sizeof to, untouched));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, ScatterKernel, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
