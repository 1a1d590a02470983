// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/placement.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using testing::message_of;

IndexArgument named(const Ints& values) {
  return {.function = "f", .name = "slots", .values = values};
}

Ints owners(const Interleave& interleave, const Ints& indices) {
  Ints out(indices.size());
  owners_of(interleave, named(indices), out);
  return out;
}

Ints local(const Interleave& interleave, const Ints& indices) {
  Ints out(indices.size());
  local_indices(interleave, named(indices), out);
  return out;
}

Ints global(const Interleave& interleave, int64_t rank, const Ints& indices) {
  Ints out(indices.size());
  global_indices(interleave, rank, named(indices), out);
  return out;
}

Ints counts(const Interleave& interleave, const Ints& lens, int64_t rank) {
  Ints out(lens.size());
  local_lens(interleave, named(lens), rank, out);
  return out;
}

TEST(Interleave, RanksTakeRunsInTurn) {
  for (int64_t shard_size = 1; shard_size <= 5; ++shard_size) {
    for (int64_t run_len = 1; run_len <= 4; ++run_len) {
      const Interleave interleave{shard_size, run_len};
      Ints indices(97);
      std::iota(indices.begin(), indices.end(), 0);
      const Ints ranks = owners(interleave, indices), places = local(interleave, indices);
      Ints next(shard_size);  // what each rank has so far
      for (std::size_t i = 0; i < indices.size(); ++i) {
        const auto x = static_cast<int64_t>(i);
        ASSERT_EQ(ranks[i], x / run_len % shard_size) << shard_size << ' ' << run_len << ' ' << i;
        ASSERT_EQ(places[i], next[ranks[i]]++) << shard_size << ' ' << run_len << ' ' << i;
        ASSERT_EQ(global(interleave, ranks[i], {places[i]}), Ints{x});
        for (int64_t rank = 0; rank < shard_size; ++rank) {
          ASSERT_EQ(counts(interleave, {x + 1}, rank), Ints{next[rank]});
        }
      }
    }
  }
}

TEST(Interleave, IndicesInAnyOrderWithPadding) {
  std::mt19937_64 random(29);
  for (int round = 0; round < 300; ++round) {
    const auto below = [&random](int64_t bound) {
      return std::uniform_int_distribution<int64_t>(0, bound - 1)(random);
    };
    const Interleave interleave{1 + below(9), 1 + below(17)};
    const int64_t bound = round % 2 == 0 ? 200 : INT64_MAX;
    Ints indices(below(40));
    for (int64_t& index : indices) {
      const bool follows = &index != indices.data() && below(2) == 0;
      const int64_t before = follows ? *(&index - 1) : -1;
      index = before >= 0 && before < INT64_MAX ? before + 1 : below(bound) - (below(4) == 0);
    }
    const Ints ranks = owners(interleave, indices), places = local(interleave, indices);
    std::map<int64_t, LocalShare> shares;
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const int64_t x = indices[i], run = x / interleave.run_len;
      const bool padding = x < 0;
      EXPECT_EQ(ranks[i], padding ? -1 : run % interleave.shard_size);
      EXPECT_EQ(
          places[i],
          padding ? -1 : run / interleave.shard_size * interleave.run_len + x % interleave.run_len
      );
      if (padding) continue;
      shares[ranks[i]].positions.push_back(static_cast<int64_t>(i));
      shares[ranks[i]].local.push_back(places[i]);
    }
    for (int64_t rank = 0; rank < interleave.shard_size; ++rank) {
      EXPECT_EQ(local_share(interleave, named(indices), rank), shares[rank]);
    }
  }
}

TEST(Interleave, EndsOfInt64) {
  for (const Interleave& interleave :
       {Interleave{}, Interleave{2, 1}, Interleave{3, 7}, Interleave{kMaxShardSize, kMaxRunLen}}) {
    const Ints last = {INT64_MAX - interleave.run_len};  // in a run that is whole
    const int64_t rank = owners(interleave, last)[0];
    EXPECT_EQ(global(interleave, rank, local(interleave, last)), last);
    EXPECT_EQ(counts(interleave, last, rank), local(interleave, last))
        << "the earlier ones of its rank";
    if (interleave == Interleave{}) continue;
    EXPECT_THROW(global(interleave, 0, {INT64_MAX}), std::invalid_argument);
  }
  EXPECT_EQ(local({}, {INT64_MAX}), Ints{INT64_MAX});
  EXPECT_EQ(global({}, 0, {INT64_MAX}), Ints{INT64_MAX});
}

TEST(Interleave, Refusals) {
  const auto sizes = [](int64_t shard_size, int64_t run_len) {
    return message_of([&] { check_interleave({shard_size, run_len}, "f", "page_size"); });
  };
  EXPECT_EQ(sizes(kMaxShardSize, kMaxRunLen), "no error");
  EXPECT_EQ(sizes(0, 1), "f: shard_size must be in [1, 32768], got 0");
  EXPECT_EQ(sizes(32769, 1), "f: shard_size must be in [1, 32768], got 32769");
  EXPECT_EQ(sizes(1, 0), "f: page_size must be in [1, 2147483647], got 0");
  EXPECT_EQ(sizes(1, 2147483648), "f: page_size must be in [1, 2147483647], got 2147483648");
  const Interleave interleave{2, 4};
  constexpr char kIndex[] = "f: slots must be >= 0, or -1 for padding, got -2 at index 1";
  EXPECT_EQ(message_of([&] { owners(interleave, {-1, -2}); }), kIndex);
  EXPECT_EQ(message_of([&] { local(interleave, {5, -2}); }), kIndex);
  EXPECT_EQ(message_of([&] { local_share(interleave, named({5, -2}), 1); }), kIndex);
  constexpr char kRank[] = "f: rank must be in [0, 2), got ";
  EXPECT_EQ(message_of([&] { local_share(interleave, named({}), 2); }), kRank + std::string("2"));
  EXPECT_EQ(message_of([&] { global(interleave, -1, {}); }), kRank + std::string("-1"));
  EXPECT_EQ(message_of([&] { counts(interleave, {}, 2); }), kRank + std::string("2"));
  EXPECT_EQ(
      message_of([&] { counts(interleave, {0, -1}, 0); }),
      "f: slots must be >= 0, got -1 at index 1"
  );
  EXPECT_EQ(
      message_of([&] { global(interleave, 1, {0, -2}); }),
      "f: slots must be in [0, 4611686018427387903], or -1 for padding, got -2 at index 1"
  );
}

}  // namespace
}  // namespace cpattn
