// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "kernels/vector/portable-inl.h"
// The vector layer comes first.
#include "kernels/engines/gemm-inl.h"
// Then what softmax stores with.
#include "kernels/softmax/softmax-inl.h"

namespace cpattn::kernels {
namespace {

template <int kDegree>
float exp2_of(float x) {
  return exp2_less_half<kDegree>(splat(x + 0.5F))[0];
}

template <int kDegree>
double worst_relative_error() {
  double worst = 0;
  for (int i = 0; i <= 200000; ++i) {
    const float x = -100.0F + static_cast<float>(i) * (108.0F / 200000);
    const double wanted = std::exp2(double{x + 0.5F} - 0.5);  // of the sum as it is rounded
    worst = std::fmax(worst, std::fabs(exp2_of<kDegree>(x) / wanted - 1));
  }
  return worst;
}

// The polynomial's own error plus a few roundings of float32 (6e-8 each).
TEST(Exp2, Degree4IsExactEnoughForSixteenBits) { EXPECT_LT(worst_relative_error<4>(), 2.9e-6); }
TEST(Exp2, Degree6IsExactEnoughForFloat32) { EXPECT_LT(worst_relative_error<6>(), 2.0e-7); }

TEST(Exp2, VanishesForHiddenKeysAndKeepsNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp2_of<4>(-infinity), 0.0F);
  EXPECT_EQ(exp2_of<6>(-1e30F), 0.0F);
  EXPECT_EQ(exp2_of<6>(0.0F), 1.0F);
  EXPECT_TRUE(std::isnan(exp2_of<4>(std::numeric_limits<float>::quiet_NaN())));
}

float softcapped(float score, float scale, float cap) {
  float scores[kLanes];
  std::fill(std::begin(scores), std::end(scores), score);
  apply_softcap(scores, 0, kLanes, scale, cap);
  return scores[0];
}

// In half ulps: a few roundings of the quotient of polynomials and of the products around it.
TEST(Softcap, IsExactRelativeToItselfForEveryCap) {
  for (float cap : {1e-37F, 1e-30F, 1e-3F, 1.0F, 30.0F, 50.0F, 1e5F, 1e8F, 1e20F, 1e37F}) {
    double worst = 0;
    for (int i = -2000; i <= 2000; ++i) {
      const float x = static_cast<float>(i) * 0.007F * std::fmin(cap, 1e36F);
      const double wanted = double{cap} * std::tanh(double{x} / cap);
      if (i != 0) worst = std::fmax(worst, std::fabs(softcapped(x, 1.0F, cap) / wanted - 1));
    }
    EXPECT_LT(worst, 8 * 0x1p-24) << cap;
    EXPECT_EQ(softcapped(0.0F, 1.0F, cap), 0.0F);
  }
}

TEST(Softcap, SmallScoresPassAnyLargeCap) {
  for (float score : {-3.0F, 1e-30F, 0.1F, 5.0F, 100.0F}) {
    EXPECT_EQ(softcapped(score, 1.0F, 1e9F), score);
    EXPECT_EQ(softcapped(score, 0.5F, 1e37F), 0.5F * score);
  }
}

TEST(Softcap, BoundsInfinityAndKeepsNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (float cap : {1e-37F, 1.0F, 1e37F}) {
    EXPECT_FLOAT_EQ(softcapped(infinity, 1.0F, cap), cap);
    EXPECT_FLOAT_EQ(softcapped(-infinity, 1.0F, cap), -cap);
    EXPECT_FLOAT_EQ(softcapped(1e30F, 1e30F, cap), cap);
    EXPECT_TRUE(std::isnan(softcapped(std::numeric_limits<float>::quiet_NaN(), 1.0F, cap)));
  }
}

TEST(PortableElements, HalfRoundTripsEveryPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    Half back{};
    narrow(widen(half), &back);
    const bool nan = (bits & 0x7fff) > 0x7c00;
    EXPECT_EQ(back.bits & (nan ? 0x7c00 : 0xffff), bits & (nan ? 0x7c00 : 0xffff));
  }
}

TEST(PortableElements, NarrowingRoundsToNearestEven) {
  const auto half = [](float x) {
    Half h{};
    narrow(x, &h);
    return h.bits;
  };
  EXPECT_EQ(half(1.0F + 0x1p-11F), 0x3c00);  // tie to even, down
  EXPECT_EQ(half(1.0F + 0x3p-11F), 0x3c02);  // tie to even, up
  EXPECT_EQ(half(65519.0F), 0x7bff);
  EXPECT_EQ(half(65520.0F), 0x7c00);
  EXPECT_EQ(half(0x1p-25F), 0x0000);  // half the smallest subnormal
  EXPECT_EQ(half(0x1.8p-25F), 0x0001);
  Bfloat16 b{};
  narrow(1.0F + 0x1p-8F, &b);
  EXPECT_EQ(b.bits, 0x3f80);
  narrow(1.0F + 0x3p-8F, &b);
  EXPECT_EQ(b.bits, 0x3f82);
}

}  // namespace
}  // namespace cpattn::kernels
