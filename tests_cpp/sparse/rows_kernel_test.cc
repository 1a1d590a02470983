// SPDX-License-Identifier: Apache-2.0
// Kernels over rows, on buffers without a byte to spare.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

using kernels::kFloat32;
using testing::random_floats;

class RowsKernel : public testing::EveryIsa {
 protected:
  const kernels::RowKernels& rows() const { return active_sparse_kernels().rows; }
};

TEST_P(RowsKernel, KvRowsComeBackWithinHalfACodesSpacing) {
  const std::vector<float> nope = random_floats(512, 1), rope = random_floats(64, 2);
  std::vector<char> row(kernels::kKvRowBytes);
  rows().quantize_kv_row[kFloat32](
      nope.data(), rope.data(), row.data(), row.data() + kernels::kKvCodeBytes
  );
  std::vector<float> back(kernels::kKvDim);
  rows().expand_kv_row_float32(row.data(), back.data());
  for (int i = 0; i < 512; ++i) {
    float scale;
    std::memcpy(&scale, &row[512 + i / 128 * 4], sizeof scale);
    const float allowed = std::fmax(std::fabs(nope[i]) / 16, scale * 0x1p-10F);
    ASSERT_NEAR(back[i], nope[i], allowed * 1.00001F) << i;
  }
  for (int i = 0; i < 64; ++i) {
    ASSERT_NEAR(back[512 + i], rope[i], std::fabs(rope[i]) * 0x1p-8F) << i;
  }
}

TEST_P(RowsKernel, GroupsOfInt8AreWithinHalfAStep) {
  const std::vector<float> x = random_floats(256, 3);
  std::vector<int8_t> codes(256);
  std::vector<float> scales(2);
  rows().quantize_groups[kFloat32](x.data(), 256, kernels::kGroupInt8, codes.data(), scales.data());
  for (int i = 0; i < 256; ++i) {
    const float scale = scales[i / 128];
    ASSERT_NEAR(codes[i] * scale, x[i], scale * 0.50001F) << i;
  }
}

TEST_P(RowsKernel, HadamardTwiceIsTheLengthTimesTheRow) {
  for (int64_t n = 1; n <= 2048; n *= 2) {
    const int64_t count = std::max(n, kernels::kHadamardLeast);
    std::vector<float> x(count), once(count), twice(count), scratch(count);
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(i % 7) - 3;
    const auto transform = rows().hadamard[kFloat32];
    transform(x.data(), count, n, 1, once.data(), scratch.data());
    transform(once.data(), count, n, 1 / static_cast<float>(n), twice.data(), scratch.data());
    ASSERT_EQ(twice, x) << n;
    for (int64_t row = 0; row < count; row += n) {
      float sum = 0;
      for (int64_t i = 0; i < n; ++i) sum += x[row + i];
      ASSERT_EQ(once[row], sum) << n;
    }
  }
}

TEST_P(RowsKernel, NormsOfEveryLength) {
  for (int64_t n = 1; n <= 80; ++n) {
    const std::vector<float> x = random_floats(n, 4), weight = random_floats(n, 5);
    const std::vector<float> bias = random_floats(n, 6);
    double squares = 0;
    for (float value : x) squares += double{value} * value;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
    std::vector<float> plain(n), biased(n);
    const auto norm = rows().rms_norm[kFloat32];
    norm(x.data(), weight.data(), nullptr, n, 1e-5F, plain.data());
    norm(x.data(), weight.data(), bias.data(), n, 1e-5F, biased.data());
    for (int64_t i = 0; i < n; ++i) {
      const double wanted = x[i] * factor * weight[i];
      ASSERT_NEAR(plain[i], wanted, 12 * 0x1p-23 * std::fabs(wanted)) << i << " of " << n;
      const double size = std::fabs(wanted) + std::fabs(bias[i]);
      ASSERT_NEAR(biased[i], wanted + bias[i], 12 * 0x1p-23 * size) << i << " of " << n;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, RowsKernel, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
