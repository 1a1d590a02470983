// SPDX-License-Identifier: Apache-2.0
// Top-k selection against a stable sort: rows on every instruction set, streams in
// pieces of any size on the portable one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/vector/portable-inl.h"
// The vector layer comes first.
#include "kernels/sparse/topk-inl.h"
#include "ops/base/kernel_table.h"
#include "testing.h"

namespace cpattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<int32_t> expected_topk(const std::vector<float>& scores, int32_t k, bool sorted) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](int32_t i) { return std::isnan(scores[i]) ? -kInfinity : scores[i]; };
  if (static_cast<int32_t>(scores.size()) > k) {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return value(a) > value(b);
    });
    order.resize(k);
    if (!sorted) std::sort(order.begin(), order.end());
  }
  order.resize(k, -1);
  return order;
}

/// Rows of n scores that mislead guesses, force ties, or hold what is not a number.
std::vector<std::vector<float>> rows_of(int32_t n) {
  std::vector<float> normal = testing::random_floats(n, 7);
  std::vector<std::vector<float>> rows = {normal};
  rows.emplace_back(n, 1.5F);
  rows.emplace_back(n, -kInfinity);
  rows.emplace_back(n, kNan);
  std::vector<float> row = normal;
  std::sort(row.begin(), row.end());
  rows.push_back(row);
  std::reverse(row.begin(), row.end());
  rows.push_back(row);
  for (int32_t i = 0; i < n; ++i) row[i] = i % 83 == 3 ? 2.0F : 0.0F;  // winners among zeros
  rows.push_back(row);
  for (int32_t i = 0; i < n; ++i) row[i] = i % 2 == 0 ? -0.0F : 0.0F;
  rows.push_back(row);
  for (int32_t i = 0; i < n; ++i) row[i] = std::round(3 * normal[i]);  // many ties
  rows.push_back(row);
  const float special[] = {kInfinity, -kInfinity, kNan, -kNan, 0.0F, -0.0F, 1e-42F, -1e-42F};
  for (int32_t i = 0; i < n; ++i) row[i] = i % 3 == 0 ? special[i / 3 % 8] : normal[i];
  rows.push_back(row);
  row = normal;  // high only where an even sample does not look
  for (int32_t i = 0; i < n; ++i) row[i] = i < n / 2 ? 10.0F + normal[i] : -kInfinity;
  rows.push_back(row);
  const int32_t spacing = std::max(n / 512, 1);  // high where an even sample looks
  for (int32_t i = 0; i < n; ++i) row[i] = i % spacing == 0 ? 100.0F + normal[i] : normal[i];
  rows.push_back(row);
  return rows;
}

class TopkRows : public testing::EveryIsa {};

TEST_P(TopkRows, EqualAStableSort) {
  const kernels::TopkKernel& kernel = active_sparse_kernels().topk;
  for (const int32_t k : {1, 2, 17, 64, 300, 2048}) {
    std::vector<char> scratch(kernel.scratch_bytes(k) + 64);
    const auto address = reinterpret_cast<uintptr_t>(scratch.data());
    char* aligned = scratch.data() + (64 - address % 64) % 64;
    for (const int32_t n : {k - 1, k, k + 1, 2 * k, 3 * k + 65, 4 * k + 129, 9001}) {
      const auto rows = rows_of(n);
      for (const std::vector<float>& scores : rows) {
        for (const bool sorted : {false, true}) {
          std::vector<int32_t> out(k + 1, 77);
          const kernels::TopkRow row = {scores.data(), n, k, sorted, out.data()};
          kernel.select(&row, aligned);
          ASSERT_EQ(out.back(), 77);
          out.pop_back();
          ASSERT_EQ(out, expected_topk(scores, k, sorted))
              << n << " choose " << k << ", row " << &scores - rows.data();
        }
      }
    }
  }
}

TEST(TopkStream, DoesNotDependOnThePieces) {
  using namespace kernels;
  for (const int32_t k : {1, 100, 300}) {
    const auto capacity = static_cast<int32_t>(topk_capacity(k));
    std::vector<float> scores(capacity);
    std::vector<int32_t> indices(capacity);
    std::vector<uint64_t> scratch(topk_sort_bytes(k) / sizeof(uint64_t));
    for (const std::vector<float>& row : rows_of(1500)) {
      for (const int piece : {1, 3, 16, 64, 333, 1500}) {
        TopkStream stream = {scores.data(), indices.data(), capacity, k};
        for (int i = 0; i < 1500; i += piece)
          topk_push(stream, row.data() + i, std::min(piece, 1500 - i), i);
        std::vector<int32_t> out(k);
        topk_finish(stream, true, out.data(), scratch.data());
        ASSERT_EQ(out, expected_topk(row, k, true)) << "in pieces of " << piece;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, TopkRows, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
