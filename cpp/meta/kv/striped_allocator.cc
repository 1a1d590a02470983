// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/striped_allocator.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr CheckFor check_config("StripedAllocator");
constexpr CheckFor check_extend("StripedAllocator.alloc_extend");
constexpr CheckFor check_cyclic("StripedAllocator.alloc_cyclic");
constexpr CheckFor check_free("StripedAllocator.free");

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/// a modulo b, in [0, b) also for negative a.
int64_t modulo(int64_t a, int64_t b) { return (a % b + b) % b; }

void check_lens(
    std::span<const int64_t> prefix_lens,
    std::span<const int64_t> seq_lens,
    std::size_t num_bases,
    int64_t page_size
) {
  check_extend(
      seq_lens.size() == prefix_lens.size(), "seq_lens must have as many elements as prefix_lens, ",
      prefix_lens.size(), ", got ", seq_lens.size()
  );
  check_extend(
      num_bases == prefix_lens.size(), "rotation_bases must have as many elements as prefix_lens, ",
      prefix_lens.size(), ", got ", num_bases
  );
  for (std::size_t i = 0; i < prefix_lens.size(); ++i) {
    check_extend(
        prefix_lens[i] >= 0 && prefix_lens[i] <= INT32_MAX,
        "prefix_lens must be >= 0 and fit into int32, got ", prefix_lens[i], " at index ", i
    );
    check_extend(
        prefix_lens[i] % page_size == 0, "prefix_lens must be multiples of page_size ", page_size,
        ", got ", prefix_lens[i], " at index ", i
    );
    check_extend(
        seq_lens[i] > prefix_lens[i] && seq_lens[i] <= INT32_MAX,
        "seq_lens must be > prefix_lens and fit into int32, got ", seq_lens[i], " behind ",
        prefix_lens[i], " at index ", i
    );
  }
}

/// New pages of a request, on the ranks in turn.
struct PageRun {
  int64_t first_class = 0;
  int64_t num_pages = 0;
  int64_t num_tokens = 0;
};

void check_in_pool(int64_t slot, std::size_t index, int64_t first, int64_t end) {
  check_free(
      slot >= first && slot < end, "slots must be in [", first, ", ", end,
      "), behind the reserved pages, got ", slot, " at index ", index
  );
}

PageRun run_of(const Interleave& pages, int64_t prefix_len, int64_t seq_len, int64_t base) {
  const int64_t prefix_pages = prefix_len / pages.run_len;
  return {
      .first_class = (modulo(base, pages.shard_size) + prefix_pages) % pages.shard_size,
      .num_pages = ceil_div(seq_len, pages.run_len) - prefix_pages,
      .num_tokens = seq_len - prefix_len,
  };
}

/// Takes the pages of a run from counts of pages, which may fall below zero.
void draw(const PageRun& run, std::vector<int64_t>& counts) {
  const auto num_classes = std::ssize(counts);
  for (int64_t& count : counts) count -= run.num_pages / num_classes;
  for (int64_t i = 0; i < run.num_pages % num_classes; ++i) {
    --counts[(run.first_class + i) % num_classes];
  }
}

/// The runs of a batch, taken from `counts`; none if these do not suffice. Sets all bases.
std::optional<std::vector<PageRun>> draw_runs(
    const Interleave& pages,
    std::vector<int64_t>& counts,
    std::span<const int64_t> prefix_lens,
    std::span<const int64_t> seq_lens,
    std::span<std::optional<int64_t>> rotation_bases
) {
  check_lens(prefix_lens, seq_lens, rotation_bases.size(), pages.run_len);
  std::vector<PageRun> runs;
  runs.reserve(prefix_lens.size());
  for (std::size_t i = 0; i < prefix_lens.size(); ++i) {
    std::optional<int64_t>& base = rotation_bases[i];
    if (!base) base = std::max_element(counts.begin(), counts.end()) - counts.begin();
    runs.push_back(run_of(pages, prefix_lens[i], seq_lens[i], *base));
    draw(runs.back(), counts);
  }
  if (*std::min_element(counts.begin(), counts.end()) < 0) return std::nullopt;
  return runs;
}

/// The slots of the tokens of runs; `next_page` returns the next page of a class.
template <class NextPage>
std::vector<int64_t> slots_of(
    std::span<const PageRun> runs, const Interleave& pages, NextPage next_page
) {
  int64_t num_tokens = 0;
  for (const PageRun& run : runs) num_tokens += run.num_tokens;
  std::vector<int64_t> slots(num_tokens);
  auto slot = slots.begin();
  for (const PageRun& run : runs) {
    int64_t left = run.num_tokens;
    for (int64_t i = 0; i < run.num_pages; ++i) {
      const auto end = slot + std::min(left, pages.run_len);
      std::iota(slot, end, next_page((run.first_class + i) % pages.shard_size) * pages.run_len);
      slot = end;
      left -= pages.run_len;
    }
  }
  return slots;
}

}  // namespace

std::optional<StripedDraw> plan_striped_draw(
    const Interleave& pages,
    std::span<const int64_t> free_pages,
    std::span<const int64_t> prefix_lens,
    std::span<const int64_t> seq_lens,
    std::span<std::optional<int64_t>> rotation_bases
) {
  check_interleave(pages, "StripedAllocator.alloc_extend", "page_size");
  check_extend(
      std::ssize(free_pages) == pages.shard_size, "free_pages must be those of ", pages.shard_size,
      " classes, got ", free_pages.size()
  );
  for (const int64_t count : free_pages) {
    check_extend(
        count >= 0 && count <= INT32_MAX, "free_pages must be >= 0 and fit int32, got ", count
    );
  }
  std::vector<int64_t> left(free_pages.begin(), free_pages.end());
  const auto runs = draw_runs(pages, left, prefix_lens, seq_lens, rotation_bases);
  if (!runs) return std::nullopt;
  StripedDraw drawn{.needs = std::vector<int64_t>(left.size()), .rows = {}};
  std::vector<int64_t> next(left.size());
  int64_t first = 0;
  for (std::size_t r = 0; r < left.size(); ++r) {
    drawn.needs[r] = free_pages[r] - left[r];
    next[r] = first;
    first += drawn.needs[r];
  }
  drawn.rows = slots_of(*runs, pages, [&](int64_t rank) { return next[rank]++; });
  return drawn;
}

StripedPages split_striped_pages(
    const Interleave& pages, std::span<const int64_t> slots, int64_t end
) {
  check_interleave(pages, "StripedAllocator.free", "page_size");
  StripedPages split{.pages = {}, .counts = std::vector<int64_t>(pages.shard_size)};
  const int64_t first = pages.shard_size * pages.run_len;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    check_in_pool(slots[i], i, first, end);
    const int64_t page = slots[i] / pages.run_len;
    if (split.pages.empty() || split.pages.back() != page) split.pages.push_back(page);
  }
  const auto place = [&](int64_t page) { return std::pair(page % pages.shard_size, page); };
  std::sort(split.pages.begin(), split.pages.end(), [&](int64_t a, int64_t b) {
    return place(a) < place(b);
  });
  const auto last = std::unique(split.pages.begin(), split.pages.end());
  split.pages.erase(last, split.pages.end());
  for (const int64_t page : split.pages) ++split.counts[page % pages.shard_size];
  return split;
}

StripedAllocator::StripedAllocator(const Config& config) : config_(config) {
  check_config(config.size >= 0, "size must be >= 0, got ", config.size);
  check_interleave({config.shard_size, config.page_size}, "StripedAllocator", "page_size");
  check_config(config.shard_size >= 2, "shard_size must be >= 2, got 1: one rank shares nothing");
  const int64_t most = (INT64_MAX / config.shard_size / config.page_size - 1) * config.page_size;
  check_config(
      config.size <= most, "size must be at most ", most, " for slots that fit int64, got ",
      config.size
  );
  classes_.resize(config.shard_size);
}

std::optional<std::vector<int64_t>> StripedAllocator::alloc_extend(
    Ints prefix_lens, Ints seq_lens, std::span<std::optional<int64_t>> rotation_bases
) {
  std::vector<int64_t> counts = class_free_page_counts();
  const auto runs = draw_runs(placement(), counts, prefix_lens, seq_lens, rotation_bases);
  if (!runs) return std::nullopt;
  merge_if_short(counts);
  return slots_of(*runs, placement(), [this](int64_t rank) {
    return take(classes_[rank]) * config_.shard_size + rank;
  });
}

std::optional<std::vector<int64_t>> StripedAllocator::alloc_cyclic(
    int64_t start_class, int64_t num_slots
) {
  check_cyclic(
      num_slots >= 1 && num_slots <= INT32_MAX, "num_slots must be in [1, ", INT32_MAX, "], got ",
      num_slots
  );
  const int64_t prefix_len = 0;
  std::optional<int64_t> base = start_class;
  return alloc_extend({&prefix_len, 1}, {&num_slots, 1}, {&base, 1});
}

void StripedAllocator::free(Ints slots) {
  const std::vector<int64_t> pages = pages_to_free(slots);
  // In reverse order, so that pages stand ascending at the front of their lists.
  for (auto page = pages.rbegin(); page != pages.rend(); ++page) {
    PageClass& of_rank = classes_[*page % config_.shard_size];
    const int64_t local = *page / config_.shard_size;
    of_rank.in_use[local] = false;
    (config_.need_sort ? of_rank.released : of_rank.returned).push_back(local);
  }
}

std::vector<int64_t> StripedAllocator::class_free_page_counts() const {
  std::vector<int64_t> counts(classes_.size());
  std::transform(classes_.begin(), classes_.end(), counts.begin(), [this](const PageClass& pages) {
    return free_pages(pages);
  });
  return counts;
}

int64_t StripedAllocator::least_full_class() const {
  const std::vector<int64_t> counts = class_free_page_counts();
  return std::max_element(counts.begin(), counts.end()) - counts.begin();
}

int64_t StripedAllocator::available_size() const {
  const std::vector<int64_t> counts = class_free_page_counts();
  const int64_t fewest = *std::min_element(counts.begin(), counts.end());
  return config_.shard_size * config_.page_size * fewest;
}

int64_t StripedAllocator::aggregate_free_size() const {
  const std::vector<int64_t> counts = class_free_page_counts();
  return config_.page_size * std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// The length of the first list.
int64_t StripedAllocator::listed(const PageClass& pages) const {
  const int64_t unused = pages_per_rank() + 1 - pages.next_unused;
  return static_cast<int64_t>(pages.returned.size()) + unused;
}

int64_t StripedAllocator::free_pages(const PageClass& pages) const {
  return listed(pages) + static_cast<int64_t>(pages.released.size());
}

/// Joins the two lists of all classes if some first list has too few pages to take until `counts`
/// are left.
void StripedAllocator::merge_if_short(const std::vector<int64_t>& counts) {
  bool is_short = false;
  for (std::size_t r = 0; r < classes_.size(); ++r) {
    is_short |= free_pages(classes_[r]) - counts[r] > listed(classes_[r]);
  }
  if (!is_short) return;
  for (PageClass& pages : classes_) {
    // The lists were ascending or are sorted here; pages that were never taken are larger.
    pages.returned.insert(pages.returned.end(), pages.released.begin(), pages.released.end());
    pages.released.clear();
    std::sort(pages.returned.begin(), pages.returned.end(), std::greater<>());
  }
}

int64_t StripedAllocator::take(PageClass& pages) {
  int64_t page = pages.next_unused;
  if (pages.returned.empty()) {
    ++pages.next_unused;
    pages.in_use.resize(pages.next_unused);
  } else {
    page = pages.returned.back();
    pages.returned.pop_back();
  }
  pages.in_use[page] = true;
  return page;
}

/// The distinct pages of the slots, ascending.
std::vector<int64_t> StripedAllocator::pages_to_free(Ints slots) const {
  const int64_t first = config_.shard_size * config_.page_size;
  const int64_t end = first * (pages_per_rank() + 1);
  std::vector<int64_t> pages;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    check_in_pool(slots[i], i, first, end);
    const int64_t page = slots[i] / config_.page_size;
    if (!pages.empty() && pages.back() == page) continue;
    const std::vector<bool>& in_use = classes_[page % config_.shard_size].in_use;
    const auto local = static_cast<std::size_t>(page / config_.shard_size);
    check_free(
        local < in_use.size() && in_use[local], "slots must be of allocated pages, got ", slots[i],
        " at index ", i, ", whose page ", page, " is free"
    );
    pages.push_back(page);
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return pages;
}

}  // namespace cpattn
