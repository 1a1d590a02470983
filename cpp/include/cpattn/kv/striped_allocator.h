// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cpattn/kv/placement.h"

namespace cpattn {

/// The pages that an extension takes from the caller's lists of free pages, one for each class.
struct StripedDraw {
  std::vector<int64_t> needs;  // [shard_size] pages from the front of each list
  // [new tokens] slots within these pages, those of class 0 first: token t is row rows[t] %
  // page_size of page number rows[t] / page_size.
  std::vector<int64_t> rows;
};

/// Plans StripedAllocator::alloc_extend for classes with `free_pages` pages, which are >= 0 and fit
/// int32. Arguments, results and errors are otherwise those of alloc_extend.
std::optional<StripedDraw> plan_striped_draw(
    const Interleave& pages,
    std::span<const int64_t> free_pages,
    std::span<const int64_t> prefix_lens,
    std::span<const int64_t> seq_lens,
    std::span<std::optional<int64_t>> rotation_bases
);

/// The distinct pages of some slots by class, ascending in each.
struct StripedPages {
  std::vector<int64_t> pages;
  std::vector<int64_t> counts;  // [shard_size] of each class
};

/// Splits freed slots. Throws std::invalid_argument for slots of reserved pages, the first
/// shard_size, and for slots from `end` on.
StripedPages split_striped_pages(
    const Interleave& pages, std::span<const int64_t> slots, int64_t end
);

/// Allocates the pages of a pool that is striped by pages over a group of ranks: `Interleave` with
/// run_len = page_size. Each rank runs the same calls on its own allocator, so all ranks have the
/// same state without communication.
///
/// The pages of rank r are class r: logical pages q * shard_size + r for q = 1 .. size / page_size.
/// Local page 0 of every rank is reserved for padding. Each class has a list of free pages, which
/// is ascending at first; pages are taken from its front, and freed ones go to its front. With
/// need_sort they go to a second list instead, until a call needs more pages of some class than its
/// first list has: then every class has one list again, in ascending order.
///
/// The pages of a sequence lie on the ranks in turn: its page P is of class (b + P) % shard_size,
/// where b is the rotation base of the sequence.
class StripedAllocator {
 public:
  using Ints = std::span<const int64_t>;

  struct Config {
    int64_t size = 0;        // slots of each rank, without those of its reserved page
    int64_t page_size = 1;   // 1 .. kMaxRunLen
    int64_t shard_size = 2;  // 2 .. kMaxShardSize
    bool need_sort = false;
  };

  /// Throws std::invalid_argument for sizes out of bounds.
  explicit StripedAllocator(const Config& config);

  /// The slots of the new tokens prefix_lens[i] .. seq_lens[i] of each request, by request and
  /// position. If the pages of some class do not suffice, returns none and takes nothing. Prefixes
  /// are whole pages, and a request has at least one new page. A missing base becomes the class
  /// with the most free pages after the earlier requests, the lowest of several, even if no slots
  /// are returned. Throws std::invalid_argument, before anything is written, for lists of different
  /// lengths and lengths that break these rules or do not fit int32.
  std::optional<std::vector<int64_t>> alloc_extend(
      Ints prefix_lens, Ints seq_lens, std::span<std::optional<int64_t>> rotation_bases
  );

  /// The slots of a sequence of num_slots >= 1 tokens whose rotation base is start_class, any
  /// integer; none if pages do not suffice.
  std::optional<std::vector<int64_t>> alloc_cyclic(int64_t start_class, int64_t num_slots);

  /// Frees the pages of the slots: one slot of a page is enough. Throws std::invalid_argument, and
  /// frees nothing, for a slot whose page is reserved, free already or outside the pool.
  void free(Ints slots);

  /// The free pages of each class.
  std::vector<int64_t> class_free_page_counts() const;
  /// The class with the most free pages, the lowest of several.
  int64_t least_full_class() const;
  /// The slots that a single sequence is sure to get, for any rotation base: as many pages of each
  /// class as the class with the fewest has.
  int64_t available_size() const;
  /// The slots of all free pages.
  int64_t aggregate_free_size() const;

  const Config& config() const { return config_; }
  int64_t pages_per_rank() const { return config_.size / config_.page_size; }

 private:
  /// The pages of one rank, by their local numbers.
  struct PageClass {
    std::vector<int64_t> returned;  // the front of the list of free pages, last first
    int64_t next_unused = 1;        // after them come all that were never taken, ascending
    std::vector<int64_t> released;  // the second list, in any order
    std::vector<bool> in_use;       // of each page below next_unused
  };
  int64_t listed(const PageClass& pages) const;
  int64_t free_pages(const PageClass& pages) const;
  void merge_if_short(const std::vector<int64_t>& counts);
  int64_t take(PageClass& pages);
  std::vector<int64_t> pages_to_free(Ints slots) const;

  Interleave placement() const { return {config_.shard_size, config_.page_size}; }

  Config config_;
  std::vector<PageClass> classes_;
};

}  // namespace cpattn
