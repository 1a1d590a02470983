// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/shard_gather.h"

#include <algorithm>
#include <cassert>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_shard_gather";
constexpr CheckFor check_gather(kFunction);
constexpr CheckFor check_translate("ShardGatherPlan.translate");

void check_scratch(const ShardScratch& scratch) {
  check_interleave(scratch.placement, kFunction, "page_size");
  const auto [shard_size, page_size] = scratch.placement;
  check_gather(
      shard_size >= 2, "placement must have a shard_size >= 2, got 1: one rank has all pages"
  );
  const int64_t most = (kMaxGatherPages / shard_size - 1) * page_size;
  check_gather(
      scratch.size >= 0 && scratch.size <= most, "size must be in [0, ", most, "], got ",
      scratch.size
  );
  const int64_t span = shard_size * page_size;
  check_gather(
      scratch.max_prefix_tokens >= 0 && scratch.max_prefix_tokens % span == 0,
      "max_prefix_tokens must be a multiple of shard_size * page_size, ", span, ", and >= 0, got ",
      scratch.max_prefix_tokens
  );
  check_gather(
      scratch.chunk_tokens >= 0 && scratch.chunk_tokens % page_size == 0,
      "chunk_tokens must be a multiple of page_size, ", page_size, ", and >= 0, got ",
      scratch.chunk_tokens
  );
  const int64_t prefix_pages = scratch.max_prefix_tokens / page_size;
  const int64_t chunk_pages = scratch.chunk_tokens / page_size;
  check_gather(
      prefix_pages <= kMaxGatherPages && chunk_pages <= kMaxGatherPages - prefix_pages,
      "max_prefix_tokens and chunk_tokens must be at most ", kMaxGatherPages,
      " pages together, got ", prefix_pages, " and ", chunk_pages
  );
}

/// Gives pages of the pool their places in the scratch.
class PlanBuilder {
 public:
  explicit PlanBuilder(const ShardScratch& scratch)
      : shard_size_(scratch.placement.shard_size),
        trash_(static_cast<int32_t>(scratch.trash_page())),
        owned_(shard_size_) {
    plan_.scratch = scratch;
    plan_.page_pos.assign(scratch.num_pages(), trash_);
  }

  /// Adds a page of a prefix. A page that was added before stays where it is.
  void add_prefix(int64_t page) {
    int32_t& place = plan_.page_pos[page];
    if (place != trash_) return;
    place = 0;  // the final place is known once all pages are
    owned_[page % shard_size_].push_back(static_cast<int32_t>(page));
  }

  /// Adds a page of new tokens; returns false for a page that was added before.
  bool add_chunk(int64_t page) {
    int32_t& place = plan_.page_pos[page];
    if (place != trash_) return false;
    place = static_cast<int32_t>(plan_.scratch.chunk_page() + num_chunk_pages());
    plan_.chunk_pages.push_back(static_cast<int32_t>(page));
    return true;
  }

  int64_t num_chunk_pages() const { return static_cast<int64_t>(plan_.chunk_pages.size()); }
  int64_t most_owned() const {
    std::size_t most = 0;
    for (const auto& pages : owned_) most = std::max(most, pages.size());
    return static_cast<int64_t>(most);
  }

  /// The plan of all pages; each rank has at most block_pages of the prefixes.
  ShardGatherPlan finish(int64_t block_pages) {
    assert(most_owned() <= block_pages);
    plan_.block_pages = block_pages;
    plan_.send_pages.assign(shard_size_ * block_pages, 0);
    for (int64_t rank = 0; rank < shard_size_; ++rank) {
      std::vector<int32_t>& pages = owned_[rank];
      // Pages of one sequence are taken in ascending order as a rule.
      if (!std::is_sorted(pages.begin(), pages.end())) std::sort(pages.begin(), pages.end());
      int64_t place = rank * block_pages;
      for (const int32_t page : pages) {
        plan_.send_pages[place] = static_cast<int32_t>(page / shard_size_);
        plan_.page_pos[page] = static_cast<int32_t>(place++);
      }
      plan_.prefix_pages.insert(plan_.prefix_pages.end(), pages.begin(), pages.end());
    }
    return std::move(plan_);
  }

 private:
  int64_t shard_size_;
  int32_t trash_;
  std::vector<std::vector<int32_t>> owned_;  // pages of prefixes of each rank
  ShardGatherPlan plan_;
};

/// The lengths and rows of a batch, checked; and the pages of its requests.
class BatchReader {
 public:
  BatchReader(const ShardScratch& scratch, const ShardBatch& batch)
      : scratch_(scratch), batch_(batch), page_size_(scratch.page_size()) {
    const std::size_t bs = batch.prefix_lens.size();
    check_gather(
        batch.seq_lens.size() == bs, "seq_lens must have as many elements as prefix_lens, ", bs,
        ", got ", batch.seq_lens.size()
    );
    const std::size_t num_rows =
        batch.req_pool_indices ? batch.req_pool_indices->size() : batch.req_to_token.rows;
    check_gather(
        num_rows == bs, batch.req_pool_indices ? "req_pool_indices" : "req_to_token",
        " must have a row for each of the ", bs, " requests, got ", num_rows
    );
    for (std::size_t i = 0; i < bs; ++i) check_request(i);
  }

  std::size_t size() const { return batch_.prefix_lens.size(); }
  int64_t prefix_pages(std::size_t i) const { return batch_.prefix_lens[i] / page_size_; }
  int64_t pages(std::size_t i) const {
    return batch_.seq_lens[i] / page_size_ + (batch_.seq_lens[i] % page_size_ != 0);
  }

  /// The page of the pool that has page `p` of request i.
  int64_t page(std::size_t i, int64_t p) const {
    const int64_t slot = batch_.req_to_token.at(row(i), p * page_size_);
    const int64_t page = slot / page_size_;
    check_gather(
        slot % page_size_ == 0 && page >= scratch_.placement.shard_size &&
            page < scratch_.num_pages(),
        "req_to_token must have slots of pages ", scratch_.placement.shard_size, " to ",
        scratch_.num_pages() - 1, " of ", page_size_, " tokens, got ", slot, " as the first of a ",
        "page at token ", p * page_size_, " of request ", i
    );
    return page;
  }

 private:
  int64_t row(std::size_t i) const {
    return batch_.req_pool_indices ? (*batch_.req_pool_indices)[i] : static_cast<int64_t>(i);
  }

  void check_request(std::size_t i) const {
    const int64_t prefix = batch_.prefix_lens[i], seq = batch_.seq_lens[i];
    check_gather(
        prefix >= 0 && prefix % page_size_ == 0, "prefix_lens must be multiples of page_size ",
        page_size_, " and >= 0, got ", prefix, " at index ", i
    );
    check_gather(
        seq >= prefix, "seq_lens must be >= prefix_lens, got ", seq, " below ", prefix,
        " at index ", i
    );
    check_gather(
        seq <= batch_.req_to_token.columns, "req_to_token must have a column for each of the ", seq,
        " tokens of request ", i, ", got ", batch_.req_to_token.columns
    );
    check_gather(
        row(i) >= 0 && row(i) < batch_.req_to_token.rows, "req_pool_indices must be in [0, ",
        batch_.req_to_token.rows, "), got ", row(i), " at index ", i
    );
  }

  const ShardScratch& scratch_;
  const ShardBatch& batch_;
  int64_t page_size_;
};

/// Adds the prefix of a request, whose pages lie on the ranks in turn.
void add_prefix(const BatchReader& batch, std::size_t i, int64_t shard_size, PlanBuilder& plan) {
  int64_t owner = -1;
  for (int64_t p = 0; p < batch.prefix_pages(i); ++p) {
    const int64_t page = batch.page(i, p);
    const int64_t wanted = p == 0 ? page % shard_size : (owner + 1) % shard_size;
    owner = page % shard_size;
    check_gather(
        owner == wanted, "req_to_token must have the pages of a prefix on the ranks in turn, got ",
        "page ", page, " of rank ", owner, " instead of ", wanted, " as page ", p, " of request ", i
    );
    plan.add_prefix(page);
  }
}

}  // namespace

ShardGatherPlan plan_shard_gather(const ShardScratch& scratch, const ShardBatch& batch) {
  check_scratch(scratch);
  const BatchReader requests(scratch, batch);
  const auto [shard_size, page_size] = scratch.placement;
  // Counted before anything is read, so pages that several requests share count several times.
  int64_t block_pages = 0, num_chunk_pages = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    block_pages += (requests.prefix_pages(i) + shard_size - 1) / shard_size;
    num_chunk_pages += requests.pages(i) - requests.prefix_pages(i);
  }
  check_gather(
      block_pages <= scratch.chunk_page() / shard_size, "max_prefix_tokens must hold ", shard_size,
      " blocks of ", block_pages, " pages of ", page_size, " tokens, got ",
      scratch.max_prefix_tokens
  );
  check_gather(
      num_chunk_pages <= scratch.chunk_tokens / page_size, "chunk_tokens must hold ",
      num_chunk_pages, " pages of ", page_size, " tokens, got ", scratch.chunk_tokens
  );
  PlanBuilder plan(scratch);
  for (std::size_t i = 0; i < requests.size(); ++i) add_prefix(requests, i, shard_size, plan);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    for (int64_t p = requests.prefix_pages(i); p < requests.pages(i); ++p) {
      const int64_t page = requests.page(i, p);
      check_gather(
          plan.add_chunk(page), "req_to_token must have each new page once and not as part of a ",
          "prefix, got page ", page, " again as page ", p, " of request ", i
      );
    }
  }
  return plan.finish(block_pages);
}

ShardGatherPlan restore_shard_gather(
    const ShardScratch& scratch,
    int64_t block_pages,
    std::span<const int64_t> prefix_pages,
    std::span<const int64_t> chunk_pages
) {
  check_scratch(scratch);
  const int64_t shard_size = scratch.placement.shard_size;
  check_gather(
      block_pages >= 0 && block_pages <= scratch.chunk_page() / shard_size,
      "block_pages must be in [0, ", scratch.chunk_page() / shard_size, "], got ", block_pages
  );
  check_gather(
      static_cast<int64_t>(chunk_pages.size()) <= scratch.chunk_tokens / scratch.page_size(),
      "chunk_pages must fit chunk_tokens, ", scratch.chunk_tokens, ", got ", chunk_pages.size()
  );
  const auto check_page = [&](int64_t page, const char* name) {
    check_gather(
        page >= shard_size && page < scratch.num_pages(), name, " must be in [", shard_size, ", ",
        scratch.num_pages(), "), got ", page
    );
  };
  PlanBuilder plan(scratch);
  for (std::size_t i = 0; i < prefix_pages.size(); ++i) {
    const int64_t page = prefix_pages[i], before = i == 0 ? 0 : prefix_pages[i - 1];
    check_page(page, "prefix_pages");
    const bool ascends = page % shard_size == before % shard_size
                             ? page > before
                             : page % shard_size > before % shard_size;
    check_gather(ascends, "prefix_pages must ascend by rank, got ", page, " behind ", before);
    plan.add_prefix(page);
  }
  check_gather(
      plan.most_owned() <= block_pages, "block_pages must be at least the prefix pages of a rank, ",
      plan.most_owned(), ", got ", block_pages
  );
  for (const int64_t page : chunk_pages) {
    check_page(page, "chunk_pages");
    check_gather(plan.add_chunk(page), "chunk_pages must occur once, got ", page, " again");
  }
  return plan.finish(block_pages);
}

void translate_slots(
    const ShardGatherPlan& plan, std::span<const int64_t> slots, std::span<int64_t> rows
) {
  assert(rows.size() == slots.size());
  const int64_t page_size = plan.scratch.page_size();
  const int64_t end = plan.scratch.num_pages() * page_size;
  int64_t first = 0, row = plan.page_pos[0] * page_size;  // of the page of the slot before
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    check_translate(
        slot >= -1 && slot < end, "slots must be in [0, ", end, "), or -1 for padding, got ", slot,
        " at index ", i
    );
    if (slot < 0) {
      rows[i] = -1;
      continue;
    }
    if (slot < first || slot - first >= page_size) {
      const int64_t page = slot / page_size;
      first = page * page_size;
      row = plan.page_pos[page] * page_size;
    }
    rows[i] = row + (slot - first);
  }
}

LocalShare plan_shard_write(
    const ShardGatherPlan& plan, std::span<const int64_t> slots, int64_t rank
) {
  constexpr char kWrite[] = "ShardGatherPlan.write_plan";
  const int64_t end = plan.scratch.num_pages() * plan.scratch.page_size();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    check(
        slots[i] < end, kWrite, ": slots must be in [0, ", end, "), or -1 for padding, got ",
        slots[i], " at index ", i
    );
  }
  return local_share(
      plan.scratch.placement, {.function = kWrite, .name = "slots", .values = slots}, rank
  );
}

}  // namespace cpattn
