// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/striped_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cpattn/base/check.h"
#include "testing.h"

namespace cpattn {
namespace {

using Ints = std::vector<int64_t>;
using Bases = std::vector<std::optional<int64_t>>;
using testing::message_of;

/// The rules on lists of logical pages, one page at a time.
struct Lists {
  StripedAllocator::Config config;
  std::vector<std::deque<int64_t>> free_pages, released;

  explicit Lists(const StripedAllocator::Config& sizes)
      : config(sizes), free_pages(sizes.shard_size), released(sizes.shard_size) {
    for (int64_t q = 1; q <= config.size / config.page_size; ++q) {
      for (int64_t r = 0; r < config.shard_size; ++r) {
        free_pages[r].push_back(q * config.shard_size + r);
      }
    }
  }

  Ints counts() const {
    Ints out;
    for (std::size_t r = 0; r < free_pages.size(); ++r) {
      out.push_back(static_cast<int64_t>(free_pages[r].size() + released[r].size()));
    }
    return out;
  }

  std::optional<Ints> extend(const Ints& prefix_lens, const Ints& seq_lens, Bases& bases) {
    Ints left = counts(), classes;
    const int64_t ps = config.page_size;
    for (std::size_t i = 0; i < bases.size(); ++i) {
      if (!bases[i]) bases[i] = std::max_element(left.begin(), left.end()) - left.begin();
      for (int64_t p = prefix_lens[i] / ps; p * ps < seq_lens[i]; ++p) {
        int64_t of_page = (*bases[i] + p) % config.shard_size;
        if (of_page < 0) of_page += config.shard_size;
        classes.push_back(of_page);
        --left[of_page];
      }
    }
    if (*std::min_element(left.begin(), left.end()) < 0) return std::nullopt;
    const Ints total = counts();
    bool is_short = false;
    for (std::size_t r = 0; r < left.size(); ++r) {
      is_short |= total[r] - left[r] > static_cast<int64_t>(free_pages[r].size());
    }
    for (std::size_t r = 0; is_short && r < left.size(); ++r) {
      free_pages[r].insert(free_pages[r].end(), released[r].begin(), released[r].end());
      std::sort(free_pages[r].begin(), free_pages[r].end());
      released[r].clear();
    }
    Ints slots;
    std::size_t next = 0;
    for (std::size_t i = 0; i < bases.size(); ++i) {
      for (int64_t token = prefix_lens[i], page = 0; token < seq_lens[i]; ++token) {
        if (token % ps == 0) {
          std::deque<int64_t>& list = free_pages[classes[next++]];
          page = list.front();
          list.pop_front();
        }
        slots.push_back(page * ps + token % ps);
      }
    }
    return slots;
  }

  /// The same by a plan and the lists' fronts, as engines that have the lists themselves.
  std::optional<Ints> drawn(const Ints& prefix_lens, const Ints& seq_lens, Bases& bases) {
    const auto draw = plan_striped_draw(
        {config.shard_size, config.page_size}, counts(), prefix_lens, seq_lens, bases
    );
    if (!draw) return std::nullopt;
    const auto size_of = [](const auto& list) { return static_cast<int64_t>(list.size()); };
    bool is_short = false;
    for (std::size_t r = 0; r < free_pages.size(); ++r) {
      is_short |= draw->needs[r] > size_of(free_pages[r]);
    }
    Ints taken;
    for (std::size_t r = 0; r < free_pages.size(); ++r) {
      std::deque<int64_t>& list = free_pages[r];
      if (is_short) {
        list.insert(list.end(), released[r].begin(), released[r].end());
        std::sort(list.begin(), list.end());
        released[r].clear();
      }
      taken.insert(taken.end(), list.begin(), list.begin() + draw->needs[r]);
      list.erase(list.begin(), list.begin() + draw->needs[r]);
    }
    Ints slots;
    for (const int64_t row : draw->rows) {
      slots.push_back(taken[row / config.page_size] * config.page_size + row % config.page_size);
    }
    return slots;
  }

  void free(const Ints& slots) {
    std::set<int64_t> pages;
    for (const int64_t slot : slots) pages.insert(slot / config.page_size);
    for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
      const int64_t r = *page % config.shard_size;
      (config.need_sort ? released[r] : free_pages[r]).push_front(*page);
    }
  }
};

Ints by_class(const std::set<int64_t>& pages, int64_t shard_size) {
  Ints sorted;
  for (int64_t r = 0; r < shard_size; ++r) {
    std::ranges::copy_if(pages, std::back_inserter(sorted), [&](int64_t page) {
      return page % shard_size == r;
    });
  }
  return sorted;
}

TEST(StripedAllocator, AnyCallsInAnyOrder) {
  std::mt19937_64 random(7);
  const auto below = [&random](int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const StripedAllocator::Config config{
        .size = below(60),
        .page_size = 1 + below(4),
        .shard_size = 2 + below(4),
        .need_sort = round % 2 == 1
    };
    StripedAllocator allocator(config);
    Lists lists(config);
    Ints used;
    for (int step = 0; step < 60; ++step) {
      Ints prefixes, lens;
      Bases bases, written;
      for (int64_t i = below(4); i > 0; --i) {
        prefixes.push_back(below(4) * config.page_size);
        lens.push_back(prefixes.back() + 1 + below(3 * config.page_size));
        bases.push_back(below(2) == 0 ? std::nullopt : std::optional(below(20) - 10));
      }
      written = bases;
      Lists before = lists;
      const std::optional<Ints> expected = lists.extend(prefixes, lens, written);
      Bases drawn = bases;
      ASSERT_EQ(before.drawn(prefixes, lens, drawn), expected);
      ASSERT_EQ(drawn, written);
      ASSERT_EQ(before.free_pages, lists.free_pages);
      ASSERT_EQ(allocator.alloc_extend(prefixes, lens, bases), expected) << round << ' ' << step;
      ASSERT_EQ(bases, written);
      if (expected) used.insert(used.end(), expected->begin(), expected->end());
      std::shuffle(used.begin(), used.end(), random);
      const Ints freed(used.begin(), used.begin() + below(static_cast<int64_t>(used.size()) + 1));
      allocator.free(freed);
      lists.free(freed);
      std::set<int64_t> pages;
      for (const int64_t slot : freed) pages.insert(slot / config.page_size);
      const Interleave of_pages{config.shard_size, config.page_size};
      const StripedPages split = split_striped_pages(of_pages, freed, INT64_MAX);
      ASSERT_EQ(split.pages, by_class(pages, config.shard_size));
      for (int64_t r = 0; r < config.shard_size; ++r) {
        const auto is_of_class = [&](int64_t page) { return page % config.shard_size == r; };
        ASSERT_EQ(split.counts[r], std::ranges::count_if(pages, is_of_class));
      }
      std::erase_if(used, [&](int64_t slot) { return pages.contains(slot / config.page_size); });
      ASSERT_EQ(allocator.class_free_page_counts(), lists.counts());
    }
  }
}

TEST(StripedAllocator, BasesOfNewSequencesBalanceTheRanks) {
  StripedAllocator allocator({.size = 8, .page_size = 2, .shard_size = 3});
  Bases bases(4);
  const auto slots = allocator.alloc_extend(Ints(4), Ints{1, 3, 1, 1}, bases);
  EXPECT_EQ(slots, (Ints{6, 8, 9, 10, 12, 14}));
  EXPECT_EQ(bases, (Bases{0, 1, 0, 1}));
  EXPECT_EQ(allocator.class_free_page_counts(), (Ints{2, 2, 3}));
  EXPECT_EQ(allocator.least_full_class(), 2);
  EXPECT_EQ(allocator.available_size(), 12);
  EXPECT_EQ(allocator.aggregate_free_size(), 14);
}

TEST(StripedAllocator, RotationBasesOfAnySize) {
  StripedAllocator allocator({.size = 8, .page_size = 2, .shard_size = 3});
  EXPECT_EQ(allocator.alloc_cyclic(INT64_MAX, 1), Ints{8}) << "2^63 - 1 is 1 modulo 3";
  EXPECT_EQ(allocator.alloc_cyclic(INT64_MIN, 1), Ints{14}) << "and -2^63 as well";
  EXPECT_EQ(allocator.alloc_cyclic(-1, 2), (Ints{10, 11}));
}

TEST(StripedAllocator, FreesAllOrNothing) {
  StripedAllocator allocator({.size = 8, .page_size = 2, .shard_size = 2});
  const Ints slots = *allocator.alloc_cyclic(0, 4);
  const std::string rule = "StripedAllocator.free: slots must be ";
  EXPECT_EQ(
      message_of([&] { allocator.free(Ints{slots[0], 8}); }),
      rule + "of allocated pages, got 8 at index 1, whose page 4 is free"
  );
  EXPECT_EQ(
      message_of([&] { allocator.free(Ints{slots[0], 3}); }),
      rule + "in [4, 20), behind the reserved pages, got 3 at index 1"
  );
  EXPECT_EQ(allocator.class_free_page_counts(), (Ints{3, 3}));
  allocator.free(slots);
  EXPECT_EQ(allocator.class_free_page_counts(), (Ints{4, 4}));
  EXPECT_THROW(allocator.free(slots), std::invalid_argument);
}

TEST(PlanStripedDraw, RefusesWhatIsNoListOfPages) {
  const Ints one = {1};
  const auto message = [&](const Ints& free_pages) {
    Bases bases(1);
    return message_of([&] { plan_striped_draw({2, 4}, free_pages, Ints{0}, one, bases); });
  };
  const std::string rule = "StripedAllocator.alloc_extend: free_pages must be ";
  EXPECT_EQ(message({3}), rule + "those of 2 classes, got 1");
  EXPECT_EQ(message({3, -1}), rule + ">= 0 and fit int32, got -1");
  EXPECT_EQ(message({3, int64_t{1} << 31}), rule + ">= 0 and fit int32, got 2147483648");
  EXPECT_EQ(message({0, 1}), "no error");
}

TEST(SplitStripedPages, RefusesSlotsOutsideThePool) {
  const auto message = [](const Ints& slots) {
    return message_of([&] { split_striped_pages({2, 4}, slots, 24); });
  };
  EXPECT_EQ(message({8, 23}), "no error");
  for (const int64_t slot : {int64_t{7}, int64_t{24}, int64_t{-1}}) {
    EXPECT_EQ(
        message({8, slot}), concat(
                                "StripedAllocator.free: slots must be in [8, 24), behind the "
                                "reserved pages, got ",
                                slot, " at index 1"
                            )
    );
  }
}

}  // namespace
}  // namespace cpattn
