// SPDX-License-Identifier: Apache-2.0
// An engine written from kernels/engines/engine-inl.h alone, over a vector layer of plain
// arrays: the loops of attention and of the indexer need no more, and follow the oracle with it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpattn/reference/reference.h"
#include "testing.h"
#include "vector/array_layer-inl.h"
// The vector layer comes first.
#include "kernels/attention/in_place-inl.h"
#include "kernels/attention/packed-inl.h"
#include "kernels/sparse/indexer-inl.h"

namespace cpattn::kernels {
namespace {

/// A float, but of another type: nothing takes it for one by mistake.
struct Cell {
  float value;
};

inline void store_probabilities(Cell* p, Vector a, Vector b) {
  for (int i = 0; i < kLanes; ++i) {
    p[i].value = a.at[i];
    p[kLanes + i].value = b.at[i];
  }
}

/// The plainest engine with a depth of two.
struct CellEngine {
  using Operand = Cell;
  static constexpr int kDepthStep = 2;
  struct Pack {
    Cell at[kLanes][kDepthStep];
  };
  template <class T>
  static constexpr bool kTakesQueries = false;

  static Pack load_columns(const Cell* p) {
    Pack pack;
    std::memcpy(&pack, p, sizeof pack);
    return pack;
  }
  static Pack splat_row(const Cell* p) {
    Pack pack;
    for (auto& pair : pack.at) std::memcpy(&pair, p, sizeof pair);
    return pack;
  }
  static Vector multiply_add(Pack a, Pack b, Vector sum) {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int i = 0; i < kDepthStep; ++i) {
        sum.at[lane] += a.at[lane][i].value * b.at[lane][i].value;
      }
    }
    return sum;
  }
  template <class T>
  static void pack_query(const T* source, int dim, Cell* row) {
    for (int d = 0; d < dim; ++d) row[d].value = widen(source[d]);
  }
  template <class T>
  static void pack_keys(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int first_row,
      int64_t panel_size,
      Cell* panels
  ) {
    for (int key = begin; key < round_up(end, kKeyGranule); ++key) {
      for (int d = 0; d < dim; ++d) {
        cell(panels, panel_size, first_row + d, key).value =
            key < end ? number<T>(rows[key], d) : 0.0F;
      }
    }
  }
  template <class T>
  static int pack_values(
      const char* const* rows,
      int begin,
      int end,
      int dim,
      int64_t panel_size,
      Cell* panels,
      int* not_finite
  ) {
    int count = 0;
    for (int key = begin; key < round_up(end, kKeyGranule); ++key) {
      bool finite = true;
      for (int d = 0; d < dim; ++d) {
        const float x = key < end ? number<T>(rows[key], d) : 0.0F;
        cell(panels, panel_size, key, d).value = x;
        finite = finite && std::isfinite(x);
      }
      if (!finite) not_finite[count++] = key;
    }
    return count;
  }
  static float probability(const Cell* p) { return p->value; }

  template <class T>
  static float number(const char* row, int d) {
    T x;
    std::memcpy(&x, row + d * sizeof(T), sizeof x);
    return widen(x);
  }

 private:
  static Cell& cell(Cell* panels, int64_t panel_size, int row, int column) {
    Cell* panel = panels + column / kPanel * panel_size;
    return panel
        [row / kDepthStep * kDepthStep * kPanel + column % kPanel * kDepthStep + row % kDepthStep];
  }
};

template <class T>
struct InPlace<T, CellEngine> {
  static constexpr bool kWidens = true;
  static void widen(const T* row, int dim, Cell* operands) {
    CellEngine::pack_query(row, dim, operands);
  }
  static CellEngine::Pack load_quad(const Cell* p) {
    CellEngine::Pack pack;
    for (int lane = 0; lane < kLanes; ++lane) {
      std::memcpy(&pack.at[lane], p + lane % 4 * CellEngine::kDepthStep, sizeof pack.at[lane]);
    }
    return pack;
  }
  template <int kVectors>
  static void load_values(const char* const* rows, int d, CellEngine::Pack* columns) {
    for (int column = 0; column < kVectors * kLanes; ++column) {
      for (int i = 0; i < CellEngine::kDepthStep; ++i) {
        columns[column / kLanes].at[column % kLanes][i].value =
            CellEngine::number<T>(rows[i], d + column);
      }
    }
  }
};

// The concepts tell engines from what is none.
struct WithoutProbability : CellEngine {
  static void probability() {}
};
struct WithoutStart : FloatScores<CellEngine> {
  static void start() {}
};
struct WithoutResume : PanelScorer<float, FloatScores<CellEngine>> {
  static void resume(int);
};
static_assert(MatrixEngine<Float32Engine, float> && InPlaceEngine<Float32Engine, Half>);
static_assert(MatrixEngine<CellEngine, Half> && InPlaceEngine<CellEngine, Half>);
static_assert(!MatrixEngine<WithoutProbability, float>);
static_assert(!InPlaceEngine<FloatScores<CellEngine>, float>, "InPlace is for one engine");
static_assert(ScoreEngine<FloatScores<CellEngine>, float>);
static_assert(!ScoreEngine<CellEngine, float> && !ScoreEngine<WithoutStart, float>);
static_assert(IndexerScorer<PanelScorer<float, FloatScores<Float32Engine>>>);
static_assert(!IndexerScorer<WithoutResume>);

}  // namespace
}  // namespace cpattn::kernels

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

constexpr int kTokens = 5, kGroup = 3, kKeys = 300, kDim = 48, kValueDim = 32;

bool never(void* /*context*/) { return false; }

/// Scratch, aligned to 64 bytes, as kernels get it.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : floats_(bytes / 4 + 16, std::nanf("")) {}
  void* data() {
    const auto address = reinterpret_cast<uintptr_t>(floats_.data());
    return floats_.data() + (64 - address % 64) % 64 / 4;
  }

 private:
  std::vector<float> floats_;
};

/// The last kTokens of kKeys tokens, one KV head.
struct Problem {
  std::vector<float> q = random_floats(int64_t{kTokens} * kGroup * kDim, 1);
  std::vector<float> k = random_floats(int64_t{kKeys} * kDim, 2);
  std::vector<float> v = random_floats(int64_t{kKeys} * kValueDim, 3);
  std::vector<float> out = std::vector<float>(int64_t{kTokens} * kGroup * kValueDim, 77.0F);
  std::vector<float> lse = std::vector<float>(int64_t{kTokens} * kGroup, 77.0F);
  static constexpr float kScale = 0.2F;

  template <class Loop>
  bool run() {
    const int32_t page = 0;
    const kernels::AttentionTile tile = {
        .q = {q.data(), int64_t{kGroup} * kDim, kDim},
        .k = {k.data(), 0, kDim},
        .v = {v.data(), 0, kValueDim},
        .pages = &page,
        .page_size = kKeys,
        .nope_dim = kDim,
        .v_head_dim = kValueDim,
        .num_tokens = kTokens,
        .group = kGroup,
        .seen =
            {.kv_len = kKeys,
             .first_position = kKeys - kTokens,
             .position_step = 1,
             .left = kUnboundedKeys},
        .scale = kScale,
        .results =
            {.out = {out.data(), int64_t{kGroup} * kValueDim, kValueDim},
             .lse = {lse.data(), kGroup, 1}},
        .hooks = {.should_stop = &never},
    };
    Scratch scratch(Loop::scratch_bytes(&tile));
    return Loop::run(&tile, scratch.data());
  }

  void expect_the_oracles_result() {
    std::vector<double> wanted(out.size()), wanted_lse(lse.size());
    const int32_t page = 0;
    const reference::PagedAttention batch{
        .q = view(q, DType::float32, {kTokens, kGroup, kDim}),
        .k_cache = view(k, DType::float32, {1, kKeys, 1, kDim}),
        .v_cache = view(v, DType::float32, {1, kKeys, 1, kValueDim}),
        .page_size = kKeys,
        .q_lens = {kTokens},
        .kv_lens = {kKeys},
        .block_tables = {.data = &page, .rows = 1, .columns = 1, .row_stride = 1},
        .scale = kScale,
    };
    reference::paged_attention(
        batch, view(wanted, DType::float64, {kTokens, kGroup, kValueDim}),
        view(wanted_lse, DType::float64, {kTokens, kGroup})
    );
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], wanted[i], 2e-6) << i;
    for (std::size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(lse[i], wanted_lse[i], 2e-6) << i;
  }
};

TEST(EngineContract, APlainEngineComputesAttention) {
  Problem problem;
  EXPECT_TRUE((problem.run<kernels::PackedLoop<float, kernels::CellEngine, 6>>()));
  problem.expect_the_oracles_result();
}

TEST(EngineContract, APlainEngineDecodes) {
  Problem problem;
  EXPECT_TRUE((problem.run<kernels::InPlaceLoop<float, kernels::CellEngine, 6, 1>>()));
  problem.expect_the_oracles_result();
}

TEST(EngineContract, APlainLayerServesTheEngineOfFloat32) {
  Problem problem;
  EXPECT_TRUE((problem.run<kernels::PackedLoop<float, kernels::Float32Engine, 6>>()));
  problem.expect_the_oracles_result();
}

TEST(EngineContract, ValuesThatAreNotFiniteReachTheRowsThatSeeThemOnly) {
  Problem clean, problem;
  using Loop = kernels::PackedLoop<float, kernels::CellEngine, 6>;
  EXPECT_TRUE(clean.run<Loop>());
  problem.v[(kKeys - 1) * kValueDim] = std::nanf("");  // the last token's
  EXPECT_TRUE(problem.run<Loop>());
  for (std::size_t i = 0; i < problem.out.size(); ++i) {
    const bool sees_it = i / (kGroup * kValueDim) == kTokens - 1;
    EXPECT_EQ(std::isnan(problem.out[i]), sees_it && i % kValueDim == 0) << i;
    if (!sees_it) {
      EXPECT_EQ(problem.out[i], clean.out[i]) << i;
    }
  }
}

TEST(EngineContract, APlainEngineScoresAndSelects) {
  constexpr int kHeads = 5, kTopk = 40;
  using Loop =
      kernels::IndexerLoop<kernels::PanelScorer<float, kernels::FloatScores<kernels::CellEngine>>>;
  std::vector<float> q = random_floats(int64_t{kHeads} * kDim, 4);
  std::vector<float> keys = random_floats(int64_t{kKeys} * kDim, 5);
  std::vector<float> weights = random_floats(kHeads, 8);
  std::vector<double> logits(kKeys);
  reference::indexer_logits(
      {.q = view(q, DType::float32, {1, kHeads, kDim}),
       .k = view(keys, DType::float32, {kKeys, kDim}),
       .weights = view(weights, DType::float32, {1, kHeads}),
       .ks = {0},
       .ke = {kKeys}},
      view(logits, DType::float64, {1, kKeys})
  );
  std::vector<int32_t> indices(kTopk);
  std::vector<float> values(kTopk);
  const int32_t page = 0;
  const kernels::IndexerQuery query = {
      .q = q.data(),
      .weights = weights.data(),
      .begin = 0,
      .end = kKeys,
      .indices = indices.data(),
      .values = values.data(),
  };
  const kernels::IndexerTile tile = {
      .queries = &query,
      .num_queries = 1,
      .num_heads = kHeads,
      .dim = kDim,
      .head_stride = kDim,
      .keys =
          {.data = keys.data(),
           .row_bytes = kDim * sizeof(float),
           .pages = &page,
           .page_size = kKeys},
      .topk = kTopk,
      .should_stop = &never,
  };
  Scratch scratch(Loop::scratch_bytes(1, kHeads, kDim, kTopk));
  ASSERT_TRUE(Loop::run(&tile, scratch.data()));
  std::vector<int32_t> wanted(kKeys);
  std::iota(wanted.begin(), wanted.end(), 0);
  std::stable_sort(wanted.begin(), wanted.end(), [&](int a, int b) {
    return logits[a] > logits[b];
  });
  wanted.resize(kTopk);
  EXPECT_EQ(indices, wanted);
  for (int i = 0; i < kTopk; ++i) EXPECT_NEAR(values[i], logits[indices[i]], 1e-4) << i;
}

}  // namespace
}  // namespace cpattn
