// SPDX-License-Identifier: Apache-2.0
// Scores of the indexer on AMX tiles, of hardware and twin, against sums in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "cpattn/base/isa.h"
#include "kernels/boundary/sparse_kernel_table.h"
#include "testing.h"

namespace cpattn::kernels {
namespace {

const std::vector<const SparseKernelTable*>& amx_tables() {
  static const auto tables = [] {
    std::vector<const SparseKernelTable*> found;
    for ([[maybe_unused]] Isa isa : supported_isas()) {
#ifdef CPATTN_HAVE_AMXTWIN
      if (isa == Isa::amx_twin) found.push_back(&sparse_table_amxtwin);
#endif
#ifdef CPATTN_HAVE_AMX
      if (isa == Isa::amx) found.push_back(&sparse_table_amx);
#endif
    }
    return found;
  }();
  return tables;
}

/// Elements of one type: their bytes, and what they stand for.
struct Elements {
  int size;  // bytes of one
  std::vector<uint8_t> bytes;
  std::vector<double> values;

  Elements(IndexerType type, int64_t count, uint32_t seed)
      : size(type == kIndexBfloat16 ? 2 : 1), bytes(count * size), values(count) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
      if (type == kIndexBfloat16) {
        set(i, normal(generator));
      } else if (type == kIndexInt8) {
        const auto x = static_cast<int8_t>(generator());
        bytes[i] = static_cast<uint8_t>(x);
        values[i] = x;
      } else {
        auto code = static_cast<uint8_t>(generator());
        if ((code & 0x7f) == 0x7f) code ^= 1;  // not NaN
        bytes[i] = code;
        values[i] = value_of_code(code);
      }
    }
  }

  /// Of bfloat16: the value nearest to zero of those next to x.
  void set(int64_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0xffff0000U;
    std::memcpy(&bytes[2 * i], reinterpret_cast<char*>(&bits) + 2, 2);
    std::memcpy(&x, &bits, sizeof bits);
    values[i] = x;
  }

  static double value_of_code(uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int mantissa = code & 7;
    const double size =
        exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return (code & 0x80) != 0 ? -size : size;
  }
};

using Range = std::pair<int64_t, int64_t>;

/// A sequence in shuffled pages, and queries that see ranges of it.
struct Problem {
  IndexerType type;
  int num_heads, dim, head_stride;
  std::vector<Range> ranges;
  int page_size = 16;
  Elements q, k;
  std::vector<float> weights, scales;
  std::vector<int32_t> pages;

  Problem(IndexerType of, int heads, int width, std::vector<Range> seen, uint32_t seed = 0)
      : type(of),
        num_heads(heads),
        dim(width),
        head_stride(width + 3),
        ranges(std::move(seen)),
        q(of, num_rows() * head_stride, seed + 1),
        k(of, num_keys() * width, seed + 2),
        weights(testing::random_floats(num_rows(), seed + 3)),
        scales(testing::random_floats(num_keys(), seed + 4)) {
    for (int64_t page = num_keys() / page_size; page-- > 0;) {
      pages.push_back(static_cast<int32_t>(page));
    }
  }

  int64_t num_rows() const { return static_cast<int64_t>(ranges.size()) * num_heads; }
  /// Of the cache.
  int64_t num_keys() const {
    int64_t end = 0;
    for (const Range& range : ranges) end = std::max(end, range.second);
    return (end + page_size - 1) / page_size * page_size;
  }
  int64_t row_of(int64_t key) const {
    return int64_t{pages[key / page_size]} * page_size + key % page_size;
  }

  std::vector<IndexerQuery> queries() const {
    std::vector<IndexerQuery> all;
    all.reserve(ranges.size());
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      all.push_back({
          .q = &q.bytes[i * num_heads * head_stride * q.size],
          .weights = &weights[i * num_heads],
          .begin = ranges[i].first,
          .end = ranges[i].second,
      });
    }
    return all;
  }

  std::vector<std::vector<float>> run(const SparseKernelTable& table) const {
    std::vector<std::vector<float>> logits(ranges.size());
    std::vector<IndexerQuery> asked = queries();
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      logits[i].resize(std::max<int64_t>(1, asked[i].end - asked[i].begin));
      asked[i].logits = logits[i].data();
    }
    run(table, asked, 0);
    return logits;
  }

  void run(const SparseKernelTable& table, std::vector<IndexerQuery>& queries, int topk) const {
    const auto count = static_cast<int32_t>(queries.size());
    const IndexerTile tile = {
        .queries = queries.data(),
        .num_queries = count,
        .num_heads = num_heads,
        .dim = dim,
        .head_stride = head_stride,
        .keys =
            {.data = k.bytes.data(),
             .page_bytes = int64_t{page_size} * dim * k.size,
             .row_bytes = int64_t{dim} * k.size,
             .scales = scales.data(),
             .scale_page_bytes = page_size * static_cast<int64_t>(sizeof(float)),
             .scale_row_bytes = sizeof(float),
             .pages = pages.data(),
             .page_size = page_size},
        .topk = topk,
        .sorted = false,
        .should_stop = [](void*) { return false; },
        .stop_context = nullptr,
    };
    const IndexerKernel& kernel = table.indexer.of_type[type];
    const int64_t bytes = kernel.scratch_bytes(count, num_heads, dim, topk);
    std::vector<uint8_t> scratch(bytes + 64, 0xff);  // NaN, whatever is read of it
    auto* aligned = &scratch[63 - (reinterpret_cast<uintptr_t>(scratch.data()) + 63) % 64];
    EXPECT_TRUE(kernel.run(&tile, aligned));
  }

  /// Sum over heads, and the sum of the sizes of what is added: rounding is relative to it.
  std::pair<double, double> expected(int query, int64_t key) const {
    const int64_t row = row_of(key);
    double sum = 0;
    double size = 0;
    for (int h = 0; h < num_heads; ++h) {
      const int64_t head = int64_t{query} * num_heads + h;
      double score = 0;
      double score_size = 0;
      for (int d = 0; d < dim; ++d) {
        const double product = q.values[head * head_stride + d] * k.values[row * dim + d];
        score += product;
        score_size += std::abs(product);
      }
      sum += weights[head] * std::max(0.0, score);
      size += std::abs(weights[head]) * score_size;
    }
    return {sum * scales[row], size * std::abs(scales[row])};
  }

  void check() const {
    for (const SparseKernelTable* table : amx_tables()) {
      const auto logits = run(*table);
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        for (int64_t key = ranges[i].first; key < ranges[i].second; ++key) {
          const auto [sum, size] = expected(static_cast<int>(i), key);
          // Sums in float32, of 2 + dim / 32 terms after sums of 16, then of heads.
          const int roundings = 20 + dim / 32 + num_heads;
          const double tolerance = size * roundings * 0x1p-24;
          ASSERT_NEAR(logits[i][key - ranges[i].first], sum, tolerance)
              << table->name << ", query " << i << ", key " << key << ", " << num_heads
              << " heads, dim " << dim;
        }
      }
    }
  }
};

class AmxIndexer : public ::testing::TestWithParam<IndexerType> {
 protected:
  void SetUp() override {
    if (amx_tables().empty()) GTEST_SKIP() << "no AMX path here";
  }
};

TEST_P(AmxIndexer, TakesAnyNumberOfHeads) {
  for (int heads = 1; heads <= 66; ++heads) {
    Problem(GetParam(), heads, heads % 2 == 0 ? 64 : 128, {{0, 40}, {3, 41}}, heads).check();
  }
}

TEST_P(AmxIndexer, TakesAnyDimension) {
  for (int dim = 16; dim <= 256; dim += 16) {
    Problem(GetParam(), 33, dim, {{0, 33}, {0, 34}}, dim).check();
  }
}

TEST_P(AmxIndexer, TakesAnyRangeOfKeys) {
  Problem(
      GetParam(), 8, 32,
      {{0, 1},
       {31, 32},
       {5, 5},
       {32, 33},
       {9, 2},
       {0, 513},
       {500, 530},
       {512, 1030},
       {1000, 1024},
       {1029, 1030}}
  )
      .check();
}

/// Three blocks of keys. Beside the scores of nine queries all of the next one is packed, beside
/// those of one a part.
TEST_P(AmxIndexer, ScoresDoNotDependOnTheirCompany) {
  const Problem all(GetParam(), 40, 128, std::vector<Range>(9, Range{0, 1100}));
  for (const SparseKernelTable* table : amx_tables()) {
    const auto scores = all.run(*table);
    for (const auto& [begin, end] : {Range{77, 78}, {300, 650}, {0, 1100}}) {
      Problem one = all;
      one.ranges = {{begin, end}};
      EXPECT_TRUE(
          std::equal(scores[0].begin() + begin, scores[0].begin() + end, one.run(*table)[0].begin())
      ) << table->name;
    }
  }
}

TEST_P(AmxIndexer, SelectsByTheSameScores) {
  constexpr int kTopk = 64;
  const Problem problem(GetParam(), 40, 64, {{0, 1200}, {0, 0}, {30, 90}, {500, 1100}});
  for (const SparseKernelTable* table : amx_tables()) {
    const auto logits = problem.run(*table);
    std::vector<IndexerQuery> asked = problem.queries();
    std::vector<std::vector<int32_t>> indices(asked.size(), std::vector<int32_t>(kTopk));
    std::vector<std::vector<float>> values(asked.size(), std::vector<float>(kTopk));
    for (std::size_t i = 0; i < asked.size(); ++i) {
      asked[i].indices = indices[i].data();
      asked[i].values = values[i].data();
      asked[i].origin = asked[i].begin;
    }
    problem.run(*table, asked, kTopk);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const auto count = std::min<int64_t>(kTopk, asked[i].end - asked[i].begin);
      std::vector<float> best(
          logits[i].begin(), logits[i].begin() + (asked[i].end - asked[i].begin)
      );
      std::sort(best.begin(), best.end(), std::greater<>());
      best.resize(count);
      std::vector<float> found(values[i].begin(), values[i].begin() + count);
      for (int64_t j = 0; j < count; ++j) EXPECT_EQ(found[j], logits[i][indices[i][j]]);
      std::sort(found.begin(), found.end(), std::greater<>());
      EXPECT_EQ(found, best) << table->name << ", query " << i;
    }
  }
}

TEST_P(AmxIndexer, TheTwinHasTheBitsOfTheHardware) {
  if (amx_tables().size() < 2) GTEST_SKIP() << "this processor has no AMX";
  const Problem problem(GetParam(), 64, 128, {{0, 600}, {100, 200}});
  EXPECT_EQ(problem.run(*amx_tables()[0]), problem.run(*amx_tables()[1]));
}

TEST_P(AmxIndexer, ZeroTimesAnInfiniteWeightIsNan) {
  const float infinity = std::numeric_limits<float>::infinity();
  Problem problem(GetParam(), 2, 16, {{0, 300}});
  problem.weights = {infinity, 0.0F};
  std::fill(problem.scales.begin(), problem.scales.end(), 1.0F);
  for (const SparseKernelTable* table : amx_tables()) {
    const auto logits = problem.run(*table);
    for (int64_t key = 0; key < 300; ++key) {
      double score = 0;
      const int64_t row = problem.row_of(key) * problem.dim;
      for (int d = 0; d < 16; ++d) score += problem.q.values[d] * problem.k.values[row + d];
      if (score > 1e-6) {
        EXPECT_EQ(logits[0][key], infinity);
      } else if (score < -1e-6) {
        EXPECT_TRUE(std::isnan(logits[0][key]));
      }
    }
  }
}

const char* type_name(const ::testing::TestParamInfo<IndexerType>& type) {
  if (type.param == kIndexBfloat16) return "bfloat16";
  return type.param == kIndexFloat8 ? "float8" : "int8";
}

INSTANTIATE_TEST_SUITE_P(
    Types, AmxIndexer, ::testing::Values(kIndexBfloat16, kIndexFloat8, kIndexInt8), type_name
);

/// Three heads fill a block of 32 with zeros, and zero times an infinity is NaN.
TEST(AmxIndexerBfloat16, InfinitiesAndNanStayInTheirKeys) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const SparseKernelTable* table : amx_tables()) {
    Problem problem(kIndexBfloat16, 3, 64, {{0, 20}, {0, 20}});
    std::fill(problem.weights.begin(), problem.weights.end(), 0.5F);
    std::fill(problem.scales.begin(), problem.scales.end(), 2.0F);
    const auto q_of = [&](int query, int head) {
      return int64_t{query * 3 + head} * problem.head_stride;
    };
    for (int head = 0; head < 3; ++head) {
      problem.q.set(q_of(0, head), head == 0 ? 1.0F : -1.0F);
      problem.q.set(q_of(1, head), -1.0F);
    }
    const auto finite = problem.run(*table);
    problem.k.set(problem.row_of(4) * 64, infinity);
    problem.k.set(problem.row_of(7) * 64, std::nanf(""));
    const auto logits = problem.run(*table);
    EXPECT_EQ(logits[0][4], infinity);  // of the first head; the others are -inf before relu
    EXPECT_EQ(logits[1][4], 0.0F);
    EXPECT_TRUE(std::isnan(logits[0][7]));
    EXPECT_TRUE(std::isnan(logits[1][7]));
    for (int query = 0; query < 2; ++query) {
      for (int key = 0; key < 20; ++key) {
        if (key != 4 && key != 7) {
          EXPECT_EQ(logits[query][key], finite[query][key]);
        }
      }
    }
  }
}

TEST(AmxIndexerInt8, LargestSumsAreExact) {
  for (const SparseKernelTable* table : amx_tables()) {
    Problem problem(kIndexInt8, 1, 256, {{0, 3}});
    std::fill(problem.q.bytes.begin(), problem.q.bytes.end(), 0x80);
    std::fill(problem.k.bytes.begin(), problem.k.bytes.end(), 0x80);
    problem.k.bytes[problem.row_of(1) * 256] = 0x7f;
    problem.weights[0] = 1.0F;
    std::fill(problem.scales.begin(), problem.scales.end(), 1.0F);
    const auto logits = problem.run(*table);
    EXPECT_EQ(logits[0], (std::vector<float>{4194304, 4194304 - 128 * 255, 4194304}));
  }
}

}  // namespace
}  // namespace cpattn::kernels
