// SPDX-License-Identifier: Apache-2.0
#include "cpattn/context_parallel/exchanges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "testing.h"

namespace cpattn {
namespace {

using Counts = std::vector<int64_t>;

/// Messages between ranks, counted one by one.
struct Wire {
  explicit Wire(int64_t size) : sent(size), received(size) {}
  void send(int64_t from, int64_t to, int64_t bytes) {
    if (from == to) return;
    sent[from] += bytes;
    received[to] += bytes;
  }
  void expect(const Traffic& moved) const {
    EXPECT_EQ(moved.sent, sent);
    EXPECT_EQ(moved.received, received);
  }
  Counts sent, received;
};

class Dice {
 public:
  explicit Dice(int seed) : engine_(seed) {}
  int64_t below(int64_t end) { return std::uniform_int_distribution<int64_t>(0, end - 1)(engine_); }
  Counts counts(int64_t size) {
    Counts values(size);
    for (int64_t& value : values) value = below(50);
    return values;
  }

 private:
  std::mt19937 engine_;
};

struct Case {
  explicit Case(int seed) : dice(seed), size(1 + dice.below(6)) {
    layer.num_kv_heads = 1 + dice.below(5);
    layer.num_heads = layer.num_kv_heads * (1 + dice.below(4));
    layer.query = 1 + dice.below(9);
    layer.key = 1 + dice.below(9);
    layer.output = 1 + dice.below(9);
    layer.merged = 1 + dice.below(9);
    tokens = dice.counts(size);
    keys = dice.counts(size);
  }
  /// Each message of an exchange by heads of some ranks: queries and keys, then results.
  void by_heads(const Counts& ranks, int64_t result, Wire& before, Wire& after) const {
    const auto shares = share_heads(layer.num_heads, layer.num_kv_heads, std::ssize(ranks));
    for (const int64_t from : ranks) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        for (int64_t head = shares[i].q.begin; head < shares[i].q.end; ++head) {
          before.send(from, ranks[i], tokens[from] * layer.query);
          after.send(ranks[i], from, tokens[from] * result);
        }
        before.send(from, ranks[i], shares[i].kv.size() * keys[from] * layer.key);
      }
    }
  }
  Counts all_ranks() const {
    Counts ranks;
    for (int64_t rank = 0; rank < size; ++rank) ranks.push_back(rank);
    return ranks;
  }

  Dice dice;
  int64_t size;
  LayerBytes layer;
  Counts tokens, keys;
};

class Exchanges : public ::testing::TestWithParam<int> {};

TEST_P(Exchanges, HeadsAreSharedOutOnceInWholeGroupsOrPartsOfOne) {
  Case c(GetParam());
  const int64_t group = c.layer.num_heads / c.layer.num_kv_heads;
  const auto shares = share_heads(c.layer.num_heads, c.layer.num_kv_heads, c.size);
  int64_t next = 0;
  for (const HeadShare& share : shares) {
    EXPECT_EQ(share.q.begin, next);
    next = share.q.end;
    if (share.q.size() == 0) {
      EXPECT_EQ(share.kv.size(), 0);
      continue;
    }
    EXPECT_EQ(share.kv.begin, share.q.begin / group);
    EXPECT_EQ(share.kv.end, (share.q.end - 1) / group + 1);
    EXPECT_TRUE(share.q.size() == group * share.kv.size() || share.kv.size() == 1);
  }
  EXPECT_EQ(next, c.layer.num_heads);
  Counts covered(c.size);
  for (const auto& part : split_shares(shares, 1 + c.dice.below(4))) {
    for (int64_t rank = 0; rank < c.size; ++rank) {
      EXPECT_EQ(part[rank].q.begin, shares[rank].q.begin + covered[rank]);
      covered[rank] += part[rank].q.size();
    }
  }
  for (int64_t rank = 0; rank < c.size; ++rank) EXPECT_EQ(covered[rank], shares[rank].q.size());
}

TEST_P(Exchanges, BytesAreThoseOfAllMessages) {
  const Case c(GetParam());
  Wire all(c.size), ring(c.size), asked(c.size), answered(c.size), before(c.size), after(c.size);
  for (int64_t from = 0; from < c.size; ++from) {
    for (int64_t to = 0; to < c.size; ++to) {
      all.send(from, to, c.keys[from] * 3);
      asked.send(from, to, c.tokens[from] * 5);
      answered.send(to, from, c.tokens[from] * 7);
      // Each rank but the one before `to` passes on the rows that began there.
      if ((from + 1) % c.size != to) ring.send(from, (from + 1) % c.size, c.keys[to] * 3);
    }
  }
  all.expect(send_rows(c.keys, 3, false));
  ring.expect(send_rows(c.keys, 3, true));
  const RoundTrip queries = send_queries(c.tokens, 5, 7);
  asked.expect(queries.before);
  answered.expect(queries.after);
  Counts heads, kv_heads;
  for (const HeadShare& share : share_heads(c.layer.num_heads, c.layer.num_kv_heads, c.size)) {
    heads.push_back(share.q.size());
    kv_heads.push_back(share.kv.size());
  }
  c.by_heads(c.all_ranks(), 11, before, after);
  const RoundTrip moved = send_by_heads(c.tokens, c.keys, c.layer, heads, kv_heads, 11);
  before.expect(moved.before);
  after.expect(moved.after);
}

TEST_P(Exchanges, EachOneReceivesItsMessages) {
  Case c(GetParam());
  const HeldRows held{
      .tokens = c.tokens,
      .keys = c.keys,
      .seen = c.keys,
      .new_keys = c.dice.counts(c.size),
      .arriving = c.dice.counts(c.size),
  };
  ExchangedLayer e{.held = held, .layer = c.layer, .writes = c.dice.below(2) > 0, .mesh = {}};
  const int64_t columns = c.size % 2 == 0 ? 2 : 1, result = c.layer.output + kLseBytes;
  for (int64_t row = 0; row < c.size / columns; ++row) {
    e.mesh.emplace_back();
    for (int64_t column = 0; column < columns; ++column) {
      e.mesh[row].push_back(row * columns + column);
    }
  }
  for (const Exchange& exchange : exchanges()) {
    const std::string name = exchange.name;
    Wire wire(c.size), back(c.size);
    for (int64_t from = 0; from < c.size && name != "usp" && name != "all_to_all"; ++from) {
      for (int64_t to = 0; to < c.size; ++to) {
        int64_t rows = c.keys[from];
        if (name == "gather" && e.writes) rows += c.tokens[from] - held.new_keys[from];
        if (name != "pass_q") wire.send(from, to, rows * c.layer.row());
        if (name == "pass_q") {
          wire.send(from, to, c.tokens[from] * c.layer.num_heads * c.layer.query);
          back.send(to, from, c.tokens[from] * c.layer.num_heads * result);
        }
      }
    }
    if (name == "all_to_all") c.by_heads(c.all_ranks(), c.layer.output, wire, back);
    for (const Counts& row : e.mesh) {
      if (name != "usp") break;
      c.by_heads(row, result, wire, back);
      const auto shares = share_heads(c.layer.num_heads, c.layer.num_kv_heads, columns);
      for (const Counts& other : e.mesh) {
        for (int64_t column = 0; column < columns; ++column) {
          for (const int64_t rank : other) {
            const int64_t bytes = shares[column].kv.size() * c.layer.key * c.keys[rank];
            if (row != other) wire.received[row[column]] += bytes;
          }
        }
      }
    }
    Counts expected = wire.received;
    for (int64_t rank = 0; rank < c.size; ++rank) {
      expected[rank] += back.received[rank];
      const bool is_written = e.writes && name != "gather";
      expected[rank] += is_written ? held.arriving[rank] * c.layer.row() : 0;
    }
    EXPECT_EQ(exchange.received(e), expected) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Random, Exchanges, ::testing::Range(0, 60));

TEST(ExchangeChoice, CountsWhatIsMergedAndTakesARingWhereNoHeadFits) {
  const LayerBytes layer{
      .num_heads = 4, .num_kv_heads = 2, .query = 2, .key = 4, .output = 2, .merged = 1
  };
  ExchangedLayer e{
      .held =
          {.tokens = {1, 1},
           .keys = {90, 90},
           .seen = {90, 90},
           .new_keys = {1, 1},
           .arriving = {0, 0}},
      .layer = layer,
      .writes = false,
      .mesh = {},
  };
  const ExchangeChoice few = choose_exchange(e, 1 << 20);
  EXPECT_EQ(few.exchange, "pass_q");
  EXPECT_EQ(
      few.reason,
      "a rank receives at most 32 bytes, by gather 720, all_to_all 368; merging counts as bytes, "
      "too: pass_q 24"
  );
  e.held.tokens = {90, 90};
  e.layer.num_kv_heads = 1;
  e.layer.num_heads = 3;
  EXPECT_EQ(choose_exchange(e, 1 << 20).exchange, "gather");
  const ExchangeChoice tight = choose_exchange(e, 1439);
  EXPECT_EQ(tight.exchange, "ring");
  EXPECT_NE(tight.reason.find("3 and 1 heads are uneven on 2 ranks; a KV head takes 1440"), -1UL);
  e.mesh = {{0, 2}};
  EXPECT_EQ(
      testing::message_of([&] { choose_exchange(e, 1); }),
      "choose_exchange: mesh must have ranks below 2, got 2"
  );
}

TEST(ExchangeChoice, SizesMustFit) {
  constexpr int64_t kLarge = int64_t{1} << 40;
  const Counts one = {1}, rows = {kLarge};
  EXPECT_EQ(
      testing::message_of([&] { send_rows(rows, kLarge, false); }),
      "send_rows: sizes must be of fewer than 2^62 bytes, got 1.20893e+24"
  );
  const SparseBytes sizes{.topk = kLarge, .query = kLarge};
  EXPECT_THROW(choose_sparse_exchange(one, one, one, sizes, 1), std::invalid_argument);
  EXPECT_THROW(choose_state_exchange(kLarge, 1, kLarge, 1, true), std::invalid_argument);
  const LayerBytes layer{.query = kLarge};
  const HeldRows held{.tokens = rows, .keys = one, .seen = one, .new_keys = one, .arriving = one};
  EXPECT_THROW(
      choose_exchange({.held = held, .layer = layer, .writes = false, .mesh = {}}, 1),
      std::invalid_argument
  );
  EXPECT_THROW(share_heads(kLarge + 1, 1, 1), std::invalid_argument);
}

TEST(ExchangeChoice, OfStatesAndOfSparseAttention) {
  const ExchangeChoice own = choose_state_exchange(10, 8, 60, 4, false);
  EXPECT_EQ(own.exchange, "all_to_all");
  EXPECT_EQ(own.received[0].second, 3 * 8 * 640);
  EXPECT_EQ(own.received[1].second, 3 * 2 * 640);
  const ExchangeChoice all = choose_state_exchange(10, 8, 60, 4, true);
  EXPECT_EQ(all.exchange, "gather");
  EXPECT_EQ(all.received[1].second, (3 * 2 + 6) * 640);
  const SparseBytes sizes{
      .topk = 2, .query = 100, .result = 50, .asking = 30, .latent = 10, .index_key = 4
  };
  const Counts keys = {6, 3}, rows = {1, 2}, visible = {9, 1, 2};
  const ExchangeChoice sparse = choose_sparse_exchange(keys, rows, visible, sizes, 72);
  EXPECT_EQ(sparse.exchange, "gather");
  EXPECT_EQ(sparse.received[0].second, std::max(20 + 2 + 12, 40 + 2 + 24));
  EXPECT_EQ(sparse.received[1].second, std::max(16 + 216 + 50, 30 + 108 + 100));
  EXPECT_EQ(choose_sparse_exchange(keys, rows, visible, sizes, 71).exchange, "pass_q");
}

TEST(HeadRounds, AreWorthTheirMessagesOrOne) {
  RoundLimits limits{.most_rounds = 8, .least_bytes = 100, .most_flops_per_byte = 5};
  const auto sizes = [&](int64_t heads, int64_t received, double flops) {
    Counts found;
    for (const HeadRange& round : head_rounds(heads, received, flops, limits)) {
      found.push_back(round.size());
    }
    return found;
  };
  EXPECT_EQ(sizes(8, 3200, 0), Counts(8, 1));
  EXPECT_EQ(sizes(32, 3200, 0), Counts(8, 4));
  EXPECT_EQ(sizes(5, 400, 0), (Counts{2, 2, 1}));
  EXPECT_EQ(sizes(8, 3200, 5 * 3200 + 1), Counts{8});
  limits.most_heads = 3;
  EXPECT_EQ(sizes(8, 100, 0), (Counts{3, 3, 2}));
  limits.most_heads = 0;
  EXPECT_EQ(
      testing::message_of([&] { sizes(8, 100, 0); }), "head_rounds: most_heads must be >= 1, got 0"
  );
}

}  // namespace
}  // namespace cpattn
