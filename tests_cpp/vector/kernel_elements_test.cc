// SPDX-License-Identifier: Apache-2.0
// The storage types, on every instruction set: how they are read and written,
// and attention in each of them at every length around its vectors and panels.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/boundary/attention_kernel.h"
#include "kernels/vector/portable-inl.h"
#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

using kernels::Bfloat16;
using kernels::Half;
using kernels::MergeWeights;
using testing::random_floats;

constexpr double kFloatUnit = 0x1p-24;  // largest relative error of one rounding
constexpr int kMaxLanes = 16;

float widen(float x) { return x; }
void narrow(float x, float* p) { *p = x; }
using kernels::narrow;
using kernels::widen;

template <class T>
struct Traits;
template <>
struct Traits<float> {
  static constexpr auto kType = kernels::kFloat32;
  static constexpr double kExp2Error = 2.0e-7;  // see exp2_test.cc
  static constexpr double kWeightUnit = 0;      // P keeps its float32
  static constexpr double kUnit = kFloatUnit;
};
template <>
struct Traits<Half> {
  static constexpr auto kType = kernels::kFloat16;
  static constexpr double kExp2Error = 2.9e-6;
  static constexpr double kWeightUnit = 0;
  static constexpr double kUnit = 0x1p-11;
};
template <>
struct Traits<Bfloat16> {
  static constexpr auto kType = kernels::kBfloat16;
  static constexpr double kExp2Error = 2.9e-6;
  static constexpr double kWeightUnit = 0x1p-8;  // where P is bfloat16, too
  static constexpr double kUnit = 0x1p-8;
};

/// Of products, beside their roundings: AMX computes float16 in two bfloat16 parts
/// and leaves out the product of the rests (engines/amx/format-inl.h).
template <class T>
double product_error() {
  const bool amx = active_isa() == Isa::amx || active_isa() == Isa::amx_twin;
  return amx && Traits<T>::kType == kernels::kFloat16 ? 0x1p-16 : 0;
}

template <class T>
std::vector<T> narrowed(const std::vector<float>& values) {
  std::vector<T> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) narrow(values[i], &result[i]);
  return result;
}

/// `rows` queries of one head at the end of `kv_len` keys, on shuffled pages of
/// seven whose unused slots hold NaN.
template <class T>
struct Problem {
  static constexpr int64_t kPage = 7;
  int rows, dim, v_dim;
  int64_t kv_len;
  std::vector<T> q, k, v;  // [row][dim]; k and v [key][dim]
  std::vector<T> out;
  std::vector<float> lse;

  Problem(int num_rows, int head_dim, int v_head_dim, int64_t num_keys)
      : rows(num_rows),
        dim(head_dim),
        v_dim(v_head_dim),
        kv_len(num_keys),
        q(narrowed<T>(random_floats(int64_t{rows} * dim, 1))),
        k(narrowed<T>(random_floats(kv_len * dim, 2))),
        v(narrowed<T>(random_floats(kv_len * v_dim, 3))),
        out(int64_t{rows} * v_dim),
        lse(rows, 77.0F) {}

  float scale() const { return 1 / std::sqrt(static_cast<float>(dim)); }

  void run() {
    const int64_t num_pages = (kv_len + kPage - 1) / kPage;
    std::vector<int32_t> pages(num_pages);
    for (int64_t i = 0; i < num_pages; ++i) pages[i] = static_cast<int32_t>(num_pages - 1 - i);
    const auto paged = [&](const std::vector<T>& source, int columns) {
      T nan;
      narrow(std::numeric_limits<float>::quiet_NaN(), &nan);
      std::vector<T> cache(num_pages * kPage * columns, nan);
      for (int64_t key = 0; key < kv_len; ++key) {
        const int64_t slot = pages[key / kPage] * kPage + key % kPage;
        std::copy_n(source.begin() + key * columns, columns, cache.begin() + slot * columns);
      }
      return cache;
    };
    const std::vector<T> k_cache = paged(k, dim);
    const std::vector<T> v_cache = paged(v, v_dim);
    const kernels::AttentionTile tile = {
        .q = {q.data(), dim},
        .k = {k_cache.data(), kPage * dim, dim},
        .v = {v_cache.data(), kPage * v_dim, v_dim},
        .pages = pages.data(),
        .page_size = kPage,
        .nope_dim = dim,
        .v_head_dim = v_dim,
        .num_tokens = rows,
        .group = 1,
        .seen =
            {.kv_len = kv_len,
             .first_position = kv_len - rows,
             .position_step = 1,
             .left = kUnboundedKeys},
        .scale = scale(),
        .results = {.out = {out.data(), v_dim}, .lse = {lse.data(), 1}},
        .hooks = {.should_stop = [](void*) { return false; }},
    };
    const kernels::AttentionKernel& kernel = active_kernels().attention[Traits<T>::kType];
    std::vector<char> scratch(kernel.scratch_bytes(&tile) + 64, '\xff');  // NaN
    const auto address = reinterpret_cast<uintptr_t>(scratch.data());
    ASSERT_TRUE(kernel.run(&tile, scratch.data() + (64 - address % 64) % 64));
  }

  /// Bounds, not experience: n products summed in float32, or in pairs rounded
  /// to odd, are wrong by at most (n + 2) units of their magnitudes' sum; an
  /// error of a score is a relative error of its weight, in P V and in the sum. Six
  /// units more go to the scaling and the exponent.
  void expect_row(int row) const {
    const int64_t keys = std::max<int64_t>(0, kv_len - rows + row + 1);
    std::vector<double> weights(keys);
    double magnitude = 0;
    double sum = 0;
    for (int64_t key = 0; key < keys; ++key) {
      double score = 0;
      double sizes = 0;
      for (int d = 0; d < dim; ++d) {
        const double x = double{widen(q[row * dim + d])} * widen(k[key * dim + d]) * scale();
        score += x;
        sizes += std::fabs(x);
      }
      magnitude = std::max(magnitude, sizes);
      weights[key] = std::exp(score);
      sum += weights[key];
    }
    using Type = Traits<T>;
    const double of_score = ((dim + 8) * kFloatUnit + product_error<T>()) * magnitude;
    const double of_sum =
        of_score + Type::kExp2Error + (static_cast<double>(keys) + 4) * kFloatUnit;
    if (keys == 0) {
      ASSERT_EQ(lse[row], -std::numeric_limits<float>::infinity()) << row;
    } else {
      const double wanted = std::log(sum);
      ASSERT_NEAR(lse[row], wanted, of_sum + 4 * kFloatUnit * std::fabs(wanted)) << row;
    }
    for (int d = 0; d < v_dim; ++d) {
      double wanted = 0;
      double size = 0;
      for (int64_t key = 0; key < keys; ++key) {
        const double x = weights[key] / sum * widen(v[key * v_dim + d]);
        wanted += x;
        size += std::fabs(x);
      }
      const double before_rounding = (2 * of_sum + Type::kWeightUnit + product_error<T>()) * size;
      ASSERT_NEAR(
          widen(out[row * v_dim + d]), wanted,
          before_rounding + Type::kUnit * (std::fabs(wanted) + before_rounding)
      ) << row
        << ' ' << d;
    }
  }
};

class KernelElements : public testing::EveryIsa {
 protected:
  /// Merges rows of `n` elements into `out`.
  template <class T>
  static void merge(
      const std::vector<const T*>& rows, const std::vector<MergeWeights>& weights, T* out, int64_t n
  ) {
    const std::vector<const void*> parts(rows.begin(), rows.end());
    active_kernels().merge_row[Traits<T>::kType](
        parts.data(), weights.data(), static_cast<int64_t>(parts.size()), out, n
    );
  }

  /// Every 16-bit pattern times a factor that is exact in float32 and leaves
  /// ties, overflows and subnormals to round.
  template <class T>
  static void expect_every_pattern(float factor) {
    std::vector<T> values(0x10000);
    for (int i = 0; i < 0x10000; ++i) values[i].bits = static_cast<uint16_t>(i);
    const std::vector<T> nothing(values.size(), T{0xffff});
    std::vector<T> result(values.size());
    merge<T>(
        {values.data(), nothing.data()}, {{0.0F, 1.0F}, {factor, 0.0F}}, result.data(), 0x10000
    );
    for (int i = 0; i < 0x10000; ++i) {
      T wanted;
      narrow(widen(values[i]) * factor, &wanted);
      if (std::isnan(widen(wanted))) {
        ASSERT_TRUE(std::isnan(widen(result[i]))) << i << " * " << factor;
      } else {
        ASSERT_EQ(result[i].bits, wanted.bits) << i << " * " << factor;
      }
    }
  }

  /// Rows of every length, merged into the first of them.
  template <class T>
  static void expect_tails() {
    for (int n = 0; n <= 5 * kMaxLanes + 1; ++n) {
      std::vector<T> a(n + kMaxLanes), b(a.size()), c(a.size());
      for (int i = 0; i < n + kMaxLanes; ++i) {
        narrow(static_cast<float>(i % 16), &a[i]);
        narrow(static_cast<float>(-2 * (i % 16)), &b[i]);
        narrow(static_cast<float>(7 * (i % 5)), &c[i]);
      }
      merge<T>({a.data(), b.data(), c.data()}, {{0, 1}, {1.5F, 0.25F}, {2.0F, 0.5F}}, a.data(), n);
      for (int i = 0; i < n + kMaxLanes; ++i) {
        const int halves = i < n ? 4 * (i % 16) + 7 * (i % 5) : 2 * (i % 16);  // exact in 8 bits
        ASSERT_EQ(widen(a[i]), 0.5F * static_cast<float>(halves)) << i << " of " << n;
      }
    }
  }

  template <class T>
  static void expect_attention() {
    for (int kv_len = 0; kv_len <= 4 * kMaxLanes + 1; ++kv_len) {
      const int rows = 1 + kv_len % 13;
      Problem<T> problem(rows, 16 + 16 * (kv_len % 5), 16 + 16 * (kv_len % 4), kv_len);
      problem.run();
      for (int row = 0; row < rows; ++row) problem.expect_row(row);
      if (HasFatalFailure()) FAIL() << rows << " rows, " << kv_len << " keys";
    }
  }
};

TEST_P(KernelElements, EveryPatternIsReadAndRounded) {
  for (float factor : {1.0F, 1.5F, -0x1.8p-12F, 0x1.002p0F}) {
    expect_every_pattern<Half>(factor);
    expect_every_pattern<Bfloat16>(factor);
  }
}

TEST_P(KernelElements, RowsOfEveryLengthAreMerged) {
  expect_tails<float>();
  expect_tails<Half>();
  expect_tails<Bfloat16>();
}

TEST_P(KernelElements, AttentionInFloat32) { expect_attention<float>(); }
TEST_P(KernelElements, AttentionInFloat16) { expect_attention<Half>(); }
TEST_P(KernelElements, AttentionInBfloat16) { expect_attention<Bfloat16>(); }

INSTANTIATE_TEST_SUITE_P(
    Isa, KernelElements, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
