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
using kernels::Half;
using kernels::kFloat32;
using testing::random_floats;

float code_value(int code) { return kernels::widen(Float8{static_cast<uint8_t>(code)}); }

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
      }
    }
  }
}

TEST_P(ScatterKernel, EveryBfloat16AsFloat8) {
  std::vector<Bfloat16> x(1 << 16);
  for (std::size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<uint16_t>(i);
  std::vector<Float8> out(x.size());
  scatter().cast[kernels::kBfloat16][kernels::kCastFloat8](
      x.data(), static_cast<int64_t>(x.size()), 1, out.data()
  );
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float value = kernels::widen(x[i]);
    if (std::isnan(value)) {
      ASSERT_EQ(out[i].bits & 0x7f, 0x7f) << i;
      continue;
    }
    Float8 wanted{};
    kernels::narrow(std::clamp(value, -448.0F, 448.0F), &wanted);
    ASSERT_EQ(out[i].bits, wanted.bits) << i;
  }
}

/// Numbers at and right beside every number that lies in the middle of two codes.
TEST_P(ScatterKernel, TiesOfFloat8AndTheirNeighbours) {
  std::vector<float> x;
  for (int code = 0; code < 0x7e; ++code) {
    const float middle = (code_value(code) + code_value(code + 1)) / 2;
    for (float value : {middle, code_value(code)}) {
      for (float beside : {-1.0F, 1.0F}) {
        x.insert(x.end(), {value, std::nextafter(value, 1e9F * beside), -value});
        x.push_back(value * (1 + beside * 0x1p-12F));  // lost to float16
      }
    }
  }
  x.insert(x.end(), {1e-45F, 1e-30F, 65504, 1.7e7F, 3e38F, INFINITY, -INFINITY});
  const auto out = cast<Float8>(x, kernels::kCastFloat8, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    Float8 wanted{};
    kernels::narrow(std::clamp(x[i], -448.0F, 448.0F), &wanted);
    ASSERT_EQ(out[i].bits, wanted.bits) << x[i];
  }
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
