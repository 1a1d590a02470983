// SPDX-License-Identifier: Apache-2.0
// Pools that ranks share: every slot has one place, every page one owner, every row one source.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "cpattn/kv/shard_gather.h"
#include "cpattn/kv/striped_allocator.h"
#include "fuzz/fuzz.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;

IndexArgument named(const Ints& values) { return {.function = "f", .name = "x", .values = values}; }

void check_placement(Reader& in) {
  const Interleave interleave{in.mostly(in.between(1, 5)), in.mostly(in.between(1, 5))};
  if (!accepted([&] { return check_interleave(interleave, "f", "run_len"), true; })) return;
  const Ints indices = in.list(in.between(0, 12), [&] { return in.mostly(in.between(-1, 60), 8); });
  Ints owners(indices.size()), local(indices.size()), counts(indices.size());
  if (!accepted([&] { return owners_of(interleave, named(indices), owners), true; })) return;
  local_indices(interleave, named(indices), local);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    FUZZ_CHECK((owners[i] < 0) == (indices[i] < 0) && owners[i] < interleave.shard_size);
    FUZZ_CHECK((local[i] < 0) == (indices[i] < 0) && local[i] <= indices[i]);
    if (indices[i] < 0) continue;
    const Ints place = {local[i]}, len = {indices[i]};
    Ints again(1);
    const auto inverse = [&] {
      return global_indices(interleave, owners[i], named(place), again), true;
    };
    // The last run may not be whole in int64, whose indices no rank and place lead to.
    if (indices[i] < INT64_MAX - interleave.run_len) FUZZ_CHECK(accepted(inverse));
    if (accepted(inverse)) FUZZ_CHECK(again[0] == indices[i]);
    local_lens(interleave, named(len), owners[i], again);
    FUZZ_CHECK(again[0] == local[i]);
  }
  const int64_t rank = in.mostly(in.between(0, 4));
  const auto share = accepted([&] { return local_share(interleave, named(indices), rank); });
  if (share) FUZZ_CHECK(std::ssize(share->positions) == std::ranges::count(owners, rank));
}

int64_t page_of(int64_t slot, const StripedAllocator& allocator) {
  return slot / allocator.config().page_size;
}

/// Slots are of pages of their own until these are freed, and free pages are counted.
void check_allocator(Reader& in) {
  const auto made = accepted([&] {
    return StripedAllocator(
        {.size = in.mostly(in.between(0, 40)),
         .page_size = in.mostly(in.between(1, 4)),
         .shard_size = in.mostly(in.between(2, 5)),
         .need_sort = in.flag()}
    );
  });
  if (!made || made->config().shard_size > 1000) return;
  StripedAllocator allocator = *made;
  const auto [size, page_size, shard_size, need_sort] = allocator.config();
  std::set<int64_t> used;
  for (int64_t step = in.between(0, 12); step > 0; --step) {
    Ints slots;
    if (in.flag()) {
      for (const int64_t page : used) {
        if (in.flag()) slots.push_back(page * page_size);
      }
      if (in.rarely(8)) slots.push_back(in.any());
      std::set<int64_t> pages;
      for (const int64_t slot : slots) pages.insert(slot < 0 ? -1 : page_of(slot, allocator));
      const bool freed = accepted([&] { return allocator.free(slots), true; }).has_value();
      FUZZ_CHECK(freed == std::ranges::includes(used, pages));
      if (freed) std::erase_if(used, [&](int64_t page) { return pages.contains(page); });
    } else {
      const int64_t bs = in.between(0, 3);
      Ints prefixes, lens;
      for (int64_t i = 0; i < bs; ++i) {
        const int64_t begin = in.between(0, 3) * page_size;
        prefixes.push_back(in.mostly(begin));
        lens.push_back(in.mostly(begin + in.between(1, 9)));
      }
      std::vector<std::optional<int64_t>> bases(in.size_near(bs));
      for (auto& base : bases) {
        if (in.flag()) base = in.any();
      }
      if (std::ranges::any_of(lens, [](int64_t len) { return len > 1 << 16; })) return;
      const auto got = accepted([&] { return allocator.alloc_extend(prefixes, lens, bases); });
      if (!got || !*got) continue;
      std::set<int64_t> pages;
      for (const int64_t slot : **got) pages.insert(page_of(slot, allocator));
      for (const int64_t page : pages) {
        FUZZ_CHECK(page >= shard_size && page / shard_size <= size / page_size);
        FUZZ_CHECK(used.insert(page).second);
      }
    }
    Ints counts(shard_size, size / page_size);
    for (const int64_t page : used) --counts[page % shard_size];
    FUZZ_CHECK(allocator.class_free_page_counts() == counts);
  }
}

/// The scratch of a plan has every page once, and slots lead there.
void check_gather(Reader& in) {
  const ShardScratch scratch{
      .placement = {in.mostly(in.between(2, 4)), in.mostly(in.between(1, 3))},
      .size = in.mostly(in.between(0, 60)),
      .max_prefix_tokens = in.mostly(in.between(0, 16) * 12),
      .chunk_tokens = in.mostly(in.between(0, 12) * 6),
  };
  if (scratch.size > 1 << 20) return;  // seconds of memory, and nothing new
  const int64_t bs = in.between(0, 3), columns = in.between(0, 16);
  const int64_t shard_size = std::max<int64_t>(1, scratch.placement.shard_size);
  Ints slots;
  for (int64_t i = 0; i < bs; ++i) {
    const int64_t first = in.between(2, 12),
                  page_size = std::clamp<int64_t>(scratch.page_size(), 1, 9);
    for (int64_t token = 0; token < columns; ++token) {
      slots.push_back(in.mostly((first + token / page_size) * page_size + token % page_size, 128));
    }
  }
  const Ints prefixes = in.list(bs, [&] { return in.mostly(in.between(0, 3) * 3); });
  const Ints lens = in.list(bs, [&] { return in.mostly(columns - in.between(0, 4)); });
  const ShardBatch batch{
      .req_to_token =
          {.data = slots.data(),
           .is_int64 = true,
           .rows = bs,
           .columns = columns,
           .row_stride = columns},
      .req_pool_indices = {},
      .prefix_lens = prefixes,
      .seq_lens = lens,
  };
  const auto plan = accepted([&] { return plan_shard_gather(scratch, batch); });
  if (!plan) return;
  std::map<int32_t, std::size_t> pages;
  for (std::size_t page = 0; page < plan->page_pos.size(); ++page) {
    const int32_t place = plan->page_pos[page];
    FUZZ_CHECK(place >= 0 && place <= scratch.trash_page());
    if (place == scratch.trash_page()) continue;
    FUZZ_CHECK(pages.emplace(place, page).second);
    if (place >= scratch.chunk_page()) continue;
    FUZZ_CHECK(place < shard_size * plan->block_pages);
    FUZZ_CHECK(plan->send_pages[place] * shard_size + place / plan->block_pages == int64_t(page));
  }
  FUZZ_CHECK(pages.size() == plan->prefix_pages.size() + plan->chunk_pages.size());
  for (int64_t i = 0; i < bs; ++i) {
    const Ints row(slots.begin() + i * columns, slots.begin() + i * columns + lens[i]);
    Ints rows(row.size());
    if (!accepted([&] { return translate_slots(*plan, row, rows), true; })) continue;
    for (std::size_t t = 0; t < row.size(); t += scratch.page_size()) {
      FUZZ_CHECK(rows[t] / scratch.page_size() < scratch.trash_page());
    }
  }
  const Ints gathered(plan->prefix_pages.begin(), plan->prefix_pages.end());
  const Ints written(plan->chunk_pages.begin(), plan->chunk_pages.end());
  FUZZ_CHECK(restore_shard_gather(scratch, plan->block_pages, gathered, written) == *plan);
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {check_placement, check_allocator, check_gather};
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
