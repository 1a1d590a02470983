// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/paged_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cpattn/attention/sequence_batch.h"
#include "cpattn/reference/reference.h"
#include "testing.h"

namespace cpattn {
namespace {

using testing::random_floats;
using testing::view;

struct Case {
  AttentionShape shape;
  int64_t page_size;
  std::vector<int64_t> q_lens, kv_lens;
  bool causal = true;
  std::optional<KeyWindow> window = std::nullopt;
  double softcap = 0;
  bool biased = false;  // by numbers, slopes and a table
};

/// float32 through the kernels against the float64 oracle.
class Attention {
 public:
  explicit Attention(const Case& c) : case_(c) {
    const auto batch = static_cast<int64_t>(c.q_lens.size());
    columns_ = 1;
    for (int64_t n : c.kv_lens) {
      columns_ = std::max(columns_, (n + c.page_size - 1) / c.page_size);
    }
    num_pages_ = batch * columns_ + 1;
    rows_ = std::accumulate(c.q_lens.begin(), c.q_lens.end(), int64_t{0});
    blocks_.resize(batch * columns_);
    // Descending ids: no sequence is contiguous. Page 0 belongs to nobody.
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      blocks_[i] = static_cast<int32_t>(num_pages_ - 1 - i);
    }
    q_ = random_floats(rows_ * c.shape.num_heads * c.shape.head_dim, 1);
    k_ = random_floats(num_pages_ * c.page_size * c.shape.num_kv_heads * c.shape.head_dim, 2);
    v_ = random_floats(num_pages_ * c.page_size * c.shape.num_kv_heads * c.shape.v_head_dim, 3);
    poison_unused_slots();
    if (!c.biased) return;
    most_queries_ = *std::max_element(c.q_lens.begin(), c.q_lens.end());
    most_keys_ = *std::max_element(c.kv_lens.begin(), c.kv_lens.end());
    numbers_ = random_floats(batch * c.shape.num_heads * most_queries_ * most_keys_, 4);
    for (std::size_t i = 0; i < numbers_.size(); i += 5) numbers_[i] = kHidden;
    slopes_ = random_floats(c.shape.num_heads, 5);
    for (float& slope : slopes_) slope /= 16;
    table_ = random_floats(c.shape.num_heads * kTableColumns, 6);
  }

  /// With `chunk`, every sequence's queries go in segments of at most that many.
  std::vector<float> run(
      std::vector<float>& lse, int num_threads, int64_t chunk = 1 << 30, bool batch_invariant = true
  ) {
    const AttentionShape& s = case_.shape;
    std::vector<float> out(rows_ * s.num_heads * s.v_head_dim, -1.0F);
    lse.assign(rows_ * s.num_heads, 1.0F);
    SequenceBatch batch{
        .shape = s,
        .q_lens = case_.q_lens,
        .kv_lens = case_.kv_lens,
        .page_size = case_.page_size,
        .num_pages = num_pages_,
        .visibility = {.causal = case_.causal, .window = case_.window},
        .allow_short_kv = true,
    };
    batch.block_tables = table();
    if (by_ranges_) {
      batch.visibility = {.causal = false, .key_ranges = ranges()};
    }
    AttentionArguments arguments{
        .q = q_view(),
        .k = paged_cache("test", "k", k_view(), KVAxisOrder::nhd, std::nullopt),
        .v = paged_cache("test", "v", v_view(), KVAxisOrder::nhd, std::nullopt),
        .scale = scale(),
        .softcap = case_.softcap,
        .bias = bias(),
        .out = view(out, DType::float32, {rows_, s.num_heads, s.v_head_dim}),
        .lse = view(lse, DType::float32, {rows_, s.num_heads}),
    };
    AttentionBatch planned = plan_sequences("test", batch, num_threads).batch;
    planned.segments = chunked(planned.segments, chunk);
    planned.batch_invariant = batch_invariant;
    run_attention(plan_attention("test", std::move(planned), num_threads), arguments);
    return out;
  }

  std::vector<double> expected(std::vector<double>& lse) {
    const AttentionShape& s = case_.shape;
    std::vector<double> out(rows_ * s.num_heads * s.v_head_dim);
    lse.resize(rows_ * s.num_heads);
    const ScoreBias biases = bias();
    reference::paged_attention(
        {.q = q_view(),
         .k_cache = k_view(),
         .v_cache = v_view(),
         .page_size = case_.page_size,
         .q_lens = case_.q_lens,
         .kv_lens = case_.kv_lens,
         .block_tables = table(),
         .scale = scale(),
         .causal = case_.causal,
         .window = case_.window,
         .softcap = case_.softcap,
         .bias = biases.numbers,
         .alibi_slopes = biases.alibi_slopes,
         .relative_bias = biases.relative_bias},
        view(out, DType::float64, {rows_, s.num_heads, s.v_head_dim}),
        view(lse, DType::float64, {rows_, s.num_heads})
    );
    return out;
  }

  /// Says of tokens and keys where they stand, which is where they lie; of the last sequence first.
  void place() {
    int64_t end = std::accumulate(case_.kv_lens.begin(), case_.kv_lens.end(), int64_t{0});
    key_positions_.resize(end);
    BiasPositions& found = positions_.emplace();
    for (std::size_t i = 0; i < case_.q_lens.size(); ++i) {
      found.first_key.push_back(end -= case_.kv_lens[i]);
      found.sequences.push_back(static_cast<int64_t>(i));
      const int64_t first = found.first_positions.emplace_back(case_.kv_lens[i] - case_.q_lens[i]);
      const auto keys = key_positions_.begin() + end;
      std::iota(keys, keys + case_.kv_lens[i], 0);
      for (int64_t token = 0; token < case_.q_lens[i]; ++token) {
        token_positions_.push_back(static_cast<int32_t>(first + token));
      }
    }
    found.tokens = view(token_positions_, DType::int32, {rows_});
    const auto num_keys = static_cast<int64_t>(key_positions_.size());
    found.keys = view(key_positions_, DType::int32, {num_keys});
  }

  /// Says of each row which keys causality and the window show it, instead of these.
  void rule_by_ranges() { by_ranges_ = true; }

  /// Overwrites K and V of a sequence from a position on.
  void poison_from(int64_t sequence, int64_t position, float value) {
    for (int64_t t = position; t < case_.kv_lens[sequence]; ++t) {
      const int64_t page = blocks_[sequence * columns_ + t / case_.page_size];
      fill_slot(page * case_.page_size + t % case_.page_size, value);
    }
  }

 private:
  void fill_slot(int64_t slot, float value) {
    const int64_t k_row = case_.shape.num_kv_heads * case_.shape.head_dim;
    const int64_t v_row = case_.shape.num_kv_heads * case_.shape.v_head_dim;
    std::fill_n(k_.begin() + slot * k_row, k_row, value);
    std::fill_n(v_.begin() + slot * v_row, v_row, value);
  }

  std::vector<int64_t> ranges() const {
    std::vector<int64_t> ranges;
    const int64_t left = case_.window && case_.window->left ? *case_.window->left : kUnboundedKeys;
    for (std::size_t i = 0; i < case_.q_lens.size(); ++i) {
      for (int64_t t = case_.kv_lens[i] - case_.q_lens[i]; t < case_.kv_lens[i]; ++t) {
        const int64_t begin = std::max<int64_t>(0, t - left);
        ranges.insert(ranges.end(), {begin, case_.causal ? t + 1 : case_.kv_lens[i]});
      }
    }
    return ranges;
  }

  ScoreBias bias() {
    if (!case_.biased) return {};
    const auto batch = static_cast<int64_t>(case_.q_lens.size());
    const int64_t heads = case_.shape.num_heads;
    return {
        .numbers = {view(numbers_, DType::float32, {batch, heads, most_queries_, most_keys_})},
        .alibi_slopes = view(slopes_, DType::float32, {heads}),
        .relative_bias = view(table_, DType::float32, {heads, kTableColumns}),
        .positions = positions_,
    };
  }

  double scale() const { return 1 / std::sqrt(static_cast<double>(case_.shape.head_dim)); }
  IndexTable table() const {
    return {
        .data = blocks_.data(),
        .rows = static_cast<int64_t>(case_.q_lens.size()),
        .columns = columns_,
        .row_stride = columns_
    };
  }
  TensorView q_view() {
    return view(q_, DType::float32, {rows_, case_.shape.num_heads, case_.shape.head_dim});
  }
  TensorView k_view() {
    return view(
        k_, DType::float32,
        {num_pages_, case_.page_size, case_.shape.num_kv_heads, case_.shape.head_dim}
    );
  }
  TensorView v_view() {
    return view(
        v_, DType::float32,
        {num_pages_, case_.page_size, case_.shape.num_kv_heads, case_.shape.v_head_dim}
    );
  }

  static std::vector<AttentionSegment> chunked(
      const std::vector<AttentionSegment>& segments, int64_t chunk
  ) {
    std::vector<AttentionSegment> pieces;
    for (const AttentionSegment& segment : segments) {
      for (int64_t begin = 0; begin < segment.q_len; begin += chunk) {
        AttentionSegment piece = segment;
        piece.q_begin += begin;
        piece.q_len = std::min(chunk, segment.q_len - begin);
        piece.first_position += begin;
        piece.first_token += begin;
        piece.kv_len = piece.first_position + piece.q_len;  // what a chunk step would see
        pieces.push_back(piece);
      }
    }
    return pieces;
  }

  /// NaN in every slot that no sequence owns: reading one shows.
  void poison_unused_slots() {
    std::vector<bool> used(num_pages_ * case_.page_size, false);
    for (std::size_t s = 0; s < case_.kv_lens.size(); ++s) {
      for (int64_t t = 0; t < case_.kv_lens[s]; ++t) {
        const int64_t page = blocks_[s * columns_ + t / case_.page_size];
        used[page * case_.page_size + t % case_.page_size] = true;
      }
    }
    for (std::size_t slot = 0; slot < used.size(); ++slot) {
      if (!used[slot]) fill_slot(slot, std::numeric_limits<float>::quiet_NaN());
    }
  }

  Case case_;
  int64_t rows_, columns_, num_pages_;
  std::vector<int32_t> blocks_;
  std::vector<float> q_, k_, v_;
  static constexpr float kHidden = -std::numeric_limits<float>::infinity();
  static constexpr int64_t kTableColumns = 41;
  int64_t most_queries_ = 0, most_keys_ = 0;
  std::vector<float> numbers_, slopes_, table_;
  bool by_ranges_ = false;
  std::vector<int32_t> token_positions_, key_positions_;
  std::optional<BiasPositions> positions_;
};

class PagedAttention : public testing::EveryIsa {
 protected:
  static void expect_matches_oracle(const Case& c, bool batch_invariant = true) {
    Attention attention(c);
    std::vector<float> lse;
    std::vector<double> expected_lse;
    const std::vector<float> out = attention.run(lse, 2, 1 << 30, batch_invariant);
    const std::vector<double> expected = attention.expected(expected_lse);
    // Scores are sums of head_dim products of unit normals, so their rounding
    // errors, and those of the weighted values, stay within some tens of eps.
    const double tolerance = 64 * 1.2e-7;
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], tolerance * (1 + std::fabs(expected[i]))) << i;
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(expected_lse[i])) {
        ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity());
      } else {
        ASSERT_NEAR(lse[i], expected_lse[i], tolerance * (1 + std::fabs(expected_lse[i]))) << i;
      }
    }
  }
};

TEST_P(PagedAttention, LengthsAroundEveryEdge) {
  // Around the vector widths, the granule of 32, the panel of 64 and the block of 256.
  for (int64_t kv : {1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 300}) {
    expect_matches_oracle({{4, 2, 32, 32}, 8, {std::min<int64_t>(kv, 5)}, {kv}});
  }
  for (int64_t q = 0; q <= 13; ++q) expect_matches_oracle({{1, 1, 16, 16}, 4, {q}, {29}});
}

TEST_P(PagedAttention, HeadDimensionsUpToTheLargest) {
  for (int32_t dim : {16, 48, 80, 96, 112, 128, 256}) {
    expect_matches_oracle({{4, 2, dim, dim}, 16, {7, 40}, {50, 40}});
  }
  expect_matches_oracle({{2, 2, 192, 128}, 16, {20}, {70}});
  expect_matches_oracle({{9, 1, 576, 512}, 16, {5}, {150}});
}

TEST_P(PagedAttention, HeadDimensionsThatAreNoMultiplesOf16) {
  for (int32_t dim : {1, 20, 72}) {
    expect_matches_oracle({{4, 2, dim, dim}, 16, {7, 40}, {50, 40}});
    expect_matches_oracle({{4, 2, dim, 24}, 16, {1, 2}, {150, 40}});
  }
  expect_matches_oracle({{2, 1, 575, 511}, 16, {1, 20}, {70, 20}});
}

TEST_P(PagedAttention, RaggedBatchesWithEmptySequencesAndEmptyRows) {
  expect_matches_oracle({{8, 2, 64, 64}, 16, {5, 0, 37, 1, 0, 12}, {5, 0, 100, 77, 9, 7}});
}

TEST_P(PagedAttention, PagesOfOneTokenAndOfMany) {
  for (int64_t page : {1, 3, 64, 512}) {
    expect_matches_oracle({{4, 1, 32, 32}, page, {33, 2}, {130, 600}});
  }
}

TEST_P(PagedAttention, WindowsSoftcapAndNoMask) {
  for (int64_t left : {0, 1, 31, 40, 300}) {
    expect_matches_oracle({{2, 1, 32, 32}, 16, {64, 9}, {400, 300}, true, {{left, {}}}});
    for (int64_t right : {0, 5, 40}) {
      expect_matches_oracle({{2, 1, 32, 32}, 16, {64, 9}, {400, 300}, false, {{left, right}}});
    }
  }
  const KeyWindow without_left{.left = std::nullopt, .right = 3};
  expect_matches_oracle({{4, 1, 32, 32}, 16, {300, 2, 70}, {300, 200, 40}, false, without_left});
  expect_matches_oracle({{2, 1, 32, 32}, 16, {64}, {100}, true, std::nullopt, 2.5});
  expect_matches_oracle({{2, 1, 32, 32}, 16, {64, 3}, {100, 5}, false});
}

TEST_P(PagedAttention, Biases) {
  for (bool batch_invariant : {false, true}) {
    for (double softcap : {0.0, 2.5}) {
      const Case causal{{4, 2, 32, 32}, 16, {64, 1, 3}, {300, 130, 3}, true, {}, softcap, true};
      expect_matches_oracle(causal, batch_invariant);
    }
    const KeyWindow window{.left = 40, .right = 7};
    const Case windowed{{4, 1, 32, 32}, 16, {9, 1}, {70, 200}, false, window, 0, true};
    expect_matches_oracle(windowed, batch_invariant);
  }
}

TEST_P(PagedAttention, HiddenKeysNeverMatter) {
  // Each new token's key and value are NaN or infinite from some position on:
  // rows before it must not notice, rows behind it must.
  for (float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Attention attention({{4, 2, 48, 80}, 16, {70}, {300}});
    std::vector<float> lse, clean_lse;
    const auto clean = attention.run(clean_lse, 1);
    attention.poison_from(0, 263, poison);
    const auto out = attention.run(lse, 1);
    const int64_t row = 4 * 80;
    for (int64_t i = 0; i < 33 * row; ++i) ASSERT_EQ(out[i], clean[i]) << i;
    for (int64_t i = 33 * row; i < 70 * row; ++i) ASSERT_FALSE(std::isfinite(out[i])) << i;
  }
}

TEST_P(PagedAttention, BitsDoNotDependOnThreads) {
  const Case c{{8, 2, 64, 64}, 16, {300, 5, 77}, {700, 900, 77}};
  Attention attention(c);
  std::vector<float> lse_one, lse_many;
  const auto one = attention.run(lse_one, 1);
  const auto many = attention.run(lse_many, 5);
  EXPECT_EQ(one, many);
  EXPECT_EQ(lse_one, lse_many);
}

TEST_P(PagedAttention, BitsDoNotDependOnChunking) {
  for (const std::optional<int64_t> left :
       {std::optional<int64_t>(), std::optional<int64_t>(100)}) {
    const bool biased = left.has_value();
    Attention attention({{4, 2, 64, 64}, 16, {300, 40}, {700, 40}, true, {{left, {}}}, 0, biased});
    std::vector<float> lse, chunked_lse;
    const auto whole = attention.run(lse, 1);
    for (int64_t chunk : {1, 7, 64, 299}) {
      EXPECT_EQ(attention.run(chunked_lse, 2, chunk), whole) << chunk;
      EXPECT_EQ(chunked_lse, lse) << chunk;
    }
  }
}

TEST_P(PagedAttention, PositionsOfNeighboursChangeNoBit) {
  for (const bool causal : {true, false}) {
    for (const std::vector<int64_t>& q_lens : {std::vector<int64_t>{300, 40}, {1, 3}}) {
      Attention attention({{4, 2, 64, 64}, 16, q_lens, {700, 40}, causal, {}, 0, true});
      std::vector<float> lse, placed_lse;
      const auto out = attention.run(lse, 2, 64);
      attention.place();
      EXPECT_EQ(attention.run(placed_lse, 2, 64), out);
      EXPECT_EQ(placed_lse, lse);
    }
  }
}

TEST_P(PagedAttention, RangesOfTheSameKeysChangeNoBit) {
  for (const std::optional<int64_t> left : {std::optional<int64_t>(), {100}}) {
    for (const bool batch_invariant : {true, false}) {
      for (const std::vector<int64_t>& q_lens : {std::vector<int64_t>{300, 40}, {1, 3}}) {
        Attention attention({{4, 2, 64, 64}, 16, q_lens, {2700, 40}, true, {{left, {}}}, 0, !left});
        std::vector<float> lse, ranged_lse;
        const auto out = attention.run(lse, 2, 1 << 30, batch_invariant);
        attention.rule_by_ranges();
        EXPECT_EQ(attention.run(ranged_lse, 2, 1 << 30, batch_invariant), out);
        EXPECT_EQ(ranged_lse, lse);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Isa, PagedAttention, ::testing::ValuesIn(supported_isas()), testing::isa_test_name
);

}  // namespace
}  // namespace cpattn
