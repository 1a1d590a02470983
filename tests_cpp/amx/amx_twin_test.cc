// SPDX-License-Identifier: Apache-2.0
// What tdpbf16ps and tdpbssd do besides multiplying and adding, as measured on hardware.
#include "kernels/engines/amx/twin-inl.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpattn/base/isa.h"
#include "kernels/boundary/attention_kernel.h"

namespace cpattn::kernels {
namespace {

uint16_t high_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

/// One element of a product: `left` and `right` are the elements of the sum in
/// memory order (at most 32, zeros after them), `sum` is what it is added to.
float product(const std::vector<float>& left, const std::vector<float>& right, float sum) {
  const TileScope tiles;
  alignas(64) uint16_t a[16][32] = {};
  alignas(64) uint16_t b[16][16][2] = {};
  alignas(64) float c[16][16] = {};
  constexpr int kRow = 3;
  constexpr int kColumn = 7;
  for (std::size_t i = 0; i < left.size(); ++i) {
    a[kRow][i] = high_half(left[i]);
    b[i / 2][kColumn][i % 2] = high_half(right[i]);
  }
  c[kRow][kColumn] = sum;
  load_tile<0>(c);
  load_tile<4>(a);
  load_tile<6>(b);
  multiply_tiles<0, 4, 6>();
  store_tile<0>(c);
  return c[kRow][kColumn];
}

TEST(AmxTwin, MultipliesAndAdds) {
  std::vector<float> left, right;
  float expected = 100;
  for (int i = 0; i < 32; ++i) {
    left.push_back(static_cast<float>(i - 9));
    right.push_back(static_cast<float>(7 * i % 11));
    expected += left[i] * right[i];
  }
  EXPECT_EQ(product(left, right, 100), expected);
}

TEST(AmxTwin, AddsEvenAndOddSumsBeforeTheAccumulator) {
  const float big = 0x1p60F;
  EXPECT_EQ(product({big, big}, {1, -1}, 1), 1.0F);  // (even + odd) + sum
  EXPECT_EQ(product({big, 0, big, 0}, {1, 0, -1, 0}, 1), 1.0F);
  // The 1 is lost in the even sum; with odd elements in turn it would survive.
  EXPECT_EQ(product({big, -big, 1, 0}, {1, 1, 1, 0}, 0), 0.0F);
}

TEST(AmxTwin, RoundsProductAndSumOnce) {
  // A subnormal product counts as long as the sum it goes into is not.
  EXPECT_EQ(product({0x1p-60F, 0, 0x1p-70F}, {0x1p-60F, 0, 0x1p-70F}, 0), 0x1.00001p-120F);
}

TEST(AmxTwin, TakesSubnormalsForZero) {
  const float subnormal = 0x1p-130F;
  EXPECT_EQ(product({subnormal}, {0x1p100F}, 0), 0.0F);
  EXPECT_EQ(product({0x1p100F}, {subnormal}, 0), 0.0F);
  EXPECT_EQ(product({0x1p-70F}, {0x1p-70F}, 0), 0.0F);
  EXPECT_EQ(product({0x1p-70F}, {0x1p-60F}, -0x1p-130F), 0.0F);
}

TEST(AmxTwin, OverflowsToInfinityAndKeepsNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(product({0x1p100F}, {0x1p100F}, 0), infinity);
  EXPECT_TRUE(std::isnan(product({infinity, infinity}, {1, -1}, 0)));
  EXPECT_TRUE(std::isnan(product({infinity}, {0}, 0)));
}

TEST(AmxTwin, IgnoresAndKeepsTheRoundingMode) {
  const unsigned before = _mm_getcsr();
  const unsigned upward = before | 0x4000;
  _mm_setcsr(upward);
  const float sum = product({1}, {1}, 0x1p24F);  // a tie, to even
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(sum, 0x1p24F);
  EXPECT_EQ(after, upward);
}

TEST(AmxTwin, MultipliesSignedBytes) {
  const TileScope tiles;
  std::mt19937 generator(1);
  alignas(64) int8_t left[16][64];
  alignas(64) int8_t right[16][16][4];
  alignas(64) int32_t sums[16][16];
  for (auto& row : left) {
    for (int8_t& x : row) x = static_cast<int8_t>(generator());
  }
  for (auto& row : right) {
    for (auto& four : row) {
      for (int8_t& x : four) x = static_cast<int8_t>(generator());
    }
  }
  for (auto& row : sums) {
    for (int32_t& x : row) x = static_cast<int32_t>(generator());
  }
  int32_t expected[16][16];
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      int64_t sum = sums[m][n];
      for (int k = 0; k < 64; ++k) sum += left[m][k] * right[k / 4][n][k % 4];
      expected[m][n] = static_cast<int32_t>(sum);  // modulo 2^32
    }
  }
  load_tile<2>(sums);
  load_tile<5>(left);
  load_tile<7>(right);
  multiply_int8_tiles<2, 5, 7>();
  store_tile<2>(sums);
  EXPECT_EQ(std::memcmp(sums, expected, sizeof sums), 0);
}

TEST(AmxTwin, SumsOfBytesWrap) {
  const TileScope tiles;
  alignas(64) int8_t operand[16][64];
  alignas(64) int32_t sums[16][16];
  std::memset(operand, -128, sizeof operand);
  std::fill_n(&sums[0][0], 256, std::numeric_limits<int32_t>::max());
  load_tile<0>(sums);
  load_tile<4>(operand);
  load_tile<6>(operand);
  multiply_int8_tiles<0, 4, 6>();
  store_tile<0>(sums);
  for (const auto& row : sums) {
    for (int32_t sum : row) EXPECT_EQ(sum, std::numeric_limits<int32_t>::min() + (64 << 14) - 1);
  }
}

#ifdef CPATTN_HAVE_AMXTWIN
TEST(AmxTwin, ScratchIsBounded) {
  const auto& isas = supported_isas();
  if (std::find(isas.begin(), isas.end(), Isa::amx_twin) == isas.end()) {
    GTEST_SKIP() << "its code is for AVX-512";
  }
  constexpr int64_t kRows = 1536;
  for (ElementType type : {kBfloat16, kFloat16}) {
    const int64_t query_bytes = type == kBfloat16 ? 2 : 4;
    for (int v_head_dim : {64, 128, 256, 512}) {
      for (int depth : {64, 128, 192, 256, 576}) {
        const int64_t row_bytes = query_bytes * depth + 4 * v_head_dim + 172;
        AttentionTile tile{};
        tile.nope_dim = depth;
        tile.v_head_dim = v_head_dim;
        tile.num_tokens = kRows;
        tile.group = 1;
        EXPECT_LE(
            table_amxtwin.attention[type].scratch_bytes(&tile), 720 * 1024 + kRows * row_bytes
        );
      }
    }
  }
}
#endif

TEST(AmxTwinDeathTest, TilesNeedAConfiguration) {
  alignas(64) uint8_t bytes[1024];
  EXPECT_DEATH(store_tile<0>(bytes), "");
}

}  // namespace
}  // namespace cpattn::kernels
