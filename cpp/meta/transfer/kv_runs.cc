// SPDX-License-Identifier: Apache-2.0
#include "meta/transfer/kv_runs.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/transfer/held_tokens.h"

namespace cpattn {
namespace {

using Runs = std::vector<TransferRun>;

/// A side during the walk over tokens.
class Cursor {
 public:
  explicit Cursor(const KVPageList& list)
      : list_(list),
        first_row_(list.owned_below(list.start)),
        num_pages_(list.smallest->num_pages()),
        cycle_(list.dcp_size * list.dcp_interleave),
        is_striped_(list.shard_size > 1) {}

  /// Whether this side holds every token of the sequence.
  bool holds_all() const { return !is_striped_ && list_.dcp_size == 1; }

  bool holds(int64_t token) const {
    if (is_striped_) {
      const int64_t index = row_of(token) / list_.page_size;
      return page_at(index) % list_.shard_size == list_.shard_rank;
    }
    return list_.dcp_size == 1 || token / list_.dcp_interleave % list_.dcp_size == list_.dcp_rank;
  }

  /// The first token after `token` that is not next to it on this side or, if this side does not
  /// hold `token`, the next token that it holds.
  int64_t next(int64_t token) const {
    if (list_.dcp_size > 1 && !holds(token)) {
      const int64_t own = token / cycle_ * cycle_ + list_.dcp_rank * list_.dcp_interleave;
      return own > token ? own : own + cycle_;
    }
    const int64_t of_page = list_.page_size - row_of(token) % list_.page_size;
    if (list_.dcp_size == 1) return token + of_page;
    return token + std::min(of_page, list_.dcp_interleave - token % list_.dcp_interleave);
  }

  int64_t slot(int64_t token) const {
    const int64_t row = row_of(token);
    const int64_t index = row / list_.page_size;
    int64_t page = page_at(index);
    if (is_striped_) page /= list_.shard_size;  // only then: it would show in the time of a plan
    if (page >= num_pages_) refuse(index);
    return page * list_.page_size + row % list_.page_size;
  }

 private:
  int64_t page_at(int64_t index) const {
    const int64_t page = list_.pages[index];
    if (page < 0) refuse(index);
    return page;
  }

  void refuse(int64_t index) const {
    check(
        false, list_.function, ": ", list_.side, " pages must be in [0, ",
        is_striped_ ? concat(list_.shard_size, " * ") : "", num_pages_, ") for ", *list_.smallest,
        ", got ", list_.pages[index], " at index ", index
    );
  }

  int64_t row_of(int64_t token) const { return list_.owned_below(token) - first_row_; }

  const KVPageList& list_;
  int64_t first_row_;
  int64_t num_pages_;
  int64_t cycle_;
  bool is_striped_;
};

/// Joins neighbours of a sorted list.
void coalesce(Runs& runs, const KVPageList& dst) {
  Runs joined;
  joined.reserve(runs.size());
  int64_t end = 0;
  for (const TransferRun& run : runs) {
    check(
        run.dst >= end, dst.function, ": ", dst.side, " pages must be distinct, got page ",
        run.dst / dst.page_size, " for two parts of the sequence"
    );
    end = run.dst + run.count;
    append_run(joined, run);
  }
  runs = std::move(joined);
}

}  // namespace

void append_run(Runs& runs, TransferRun run) {
  if (!runs.empty()) {
    TransferRun& last = runs.back();
    if (last.src + last.count == run.src && last.dst + last.count == run.dst) {
      last.count += run.count;
      return;
    }
  }
  runs.push_back(run);
}

/// Sorts by destination, digit by digit from the lowest: a thousand runs take a few microseconds.
bool sort_by_destination(Runs& runs) {
  constexpr int kBits = 11;
  const auto by_dst = [](const TransferRun& a, const TransferRun& b) { return a.dst < b.dst; };
  if (std::is_sorted(runs.begin(), runs.end(), by_dst)) return false;
  const auto [low, high] = std::minmax_element(runs.begin(), runs.end(), by_dst);
  const int64_t base = low->dst;
  const int num_bits = std::bit_width(static_cast<uint64_t>(high->dst - base));
  Runs other(runs.size());
  for (int shift = 0; shift < num_bits; shift += kBits) {
    const auto digit = [base, shift](const TransferRun& run) {
      return (run.dst - base) >> shift & ((1 << kBits) - 1);
    };
    std::array<uint32_t, 1 << kBits> place = {};
    for (const TransferRun& run : runs) ++place[digit(run)];
    uint32_t sum = 0;
    for (uint32_t& count : place) sum += std::exchange(count, sum);
    for (const TransferRun& run : runs) other[place[digit(run)]++] = run;
    runs.swap(other);
  }
  return true;
}

int64_t KVPageList::owned_below(int64_t token) const {
  if (dcp_size == 1) return token;
  const int64_t cycle = dcp_size * dcp_interleave;
  const int64_t rest = token % cycle - dcp_rank * dcp_interleave;
  return token / cycle * dcp_interleave + std::clamp<int64_t>(rest, 0, dcp_interleave);
}

IndexRange KVPageList::rows(IndexRange tokens) const {
  const int64_t first = owned_below(start);
  return {owned_below(tokens.begin) - first, owned_below(tokens.end) - first};
}

void check_holds(const KVPageList& list, IndexRange tokens) {
  check(
      list.start <= tokens.begin && tokens.begin <= tokens.end &&
          list.rows(tokens).end <= list.num_rows(),
      list.function, ": ", list.side, " pages must hold tokens ", tokens, ", got ",
      list.pages.size(), " of ", list.page_size, " from ", list.start, " on"
  );
}

std::vector<IndexRange> tokens_of_shard(const KVPageList& list, IndexRange tokens) {
  if (list.shard_size == 1 || tokens.size() == 0) return {tokens};
  std::vector<IndexRange> ranges;
  int64_t token = tokens.begin;
  while (token < tokens.end) {
    const int64_t index = (token - list.start) / list.page_size;
    const int64_t next = std::min(tokens.end, list.start + (index + 1) * list.page_size);
    const int64_t page = list.pages[index];
    check(
        page >= 0, list.function, ": ", list.side, " pages must be >= 0, got ", page, " at index ",
        index
    );
    if (page % list.shard_size == list.shard_rank) {
      const bool joins = !ranges.empty() && ranges.back().end == token;
      if (joins) ranges.back().end = next;
      if (!joins) ranges.push_back({token, next});
    }
    token = next;
  }
  return ranges;
}

void check_pages_distinct(const KVPageList& dst, IndexRange tokens) {
  const IndexRange rows = dst.rows(tokens);
  if (rows.size() == 0) return;
  const auto first = dst.pages.begin() + rows.begin / dst.page_size;
  const auto last = dst.pages.begin() + (rows.end + dst.page_size - 1) / dst.page_size;
  std::vector<int64_t> written(first, last);
  std::sort(written.begin(), written.end());
  auto twice = std::adjacent_find(written.begin(), written.end());
  for (auto page = dst.pages.begin(); page != first && twice == written.end(); ++page) {
    const auto found = std::lower_bound(written.begin(), written.end(), *page);
    if (found != written.end() && *found == *page) twice = found;
  }
  check(
      twice == written.end(), dst.function, ": ", dst.side, " pages must be distinct, got page ",
      twice == written.end() ? 0 : *twice, " for two parts of the sequence"
  );
}

std::vector<TransferRun> token_runs(
    const KVPageList& src, const KVPageList& dst, IndexRange tokens
) {
  if (tokens.size() == 0) return {};
  const Cursor from(src), to(dst);
  const bool all_go = from.holds_all() && to.holds_all();
  Runs runs;
  runs.reserve(std::min<std::size_t>(src.pages.size() + dst.pages.size(), tokens.size()));
  int64_t num_steps = 0;
  for (int64_t token = tokens.begin; token < tokens.end; ++num_steps) {
    check(
        num_steps < kMaxSteps, dst.function,
        ": pages and dcp_interleave must cut a sequence into at ", "most ", kMaxSteps,
        " pieces, got more of tokens ", tokens
    );
    if (!all_go) {
      const Cursor* without = !to.holds(token) ? &to : !from.holds(token) ? &from : nullptr;
      if (without) {
        token = without->next(token);
        continue;
      }
    }
    const int64_t next = std::min({from.next(token), to.next(token), tokens.end});
    append_run(runs, {from.slot(token), to.slot(token), next - token});
    token = next;
  }
  sort_by_destination(runs);
  coalesce(runs, dst);
  return runs;
}

namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 48;  // sums and products of few stay in int64

KVPageList list_of(const char* function, const KVLayout& layout, const KVTokenRange& range) {
  const KVPlacement& placement = layout.placement();
  KVPageList list = {
      .function = function,
      .side = "given",
      .pages = range.pages,
      .page_size = placement.page_size,
      .start = range.start,
      .dcp_rank = placement.dcp_rank,
      .dcp_size = placement.dcp_size,
      .dcp_interleave = placement.dcp_interleave,
      .shard_rank = placement.shard_rank,
      .shard_size = placement.shard_size,
  };
  for (const KVEntry& entry : layout.entries()) {
    if (entry.is_elided()) continue;
    const bool smaller = !list.smallest || entry.num_pages() < list.smallest->num_pages();
    if (smaller) list.smallest = &entry;
  }
  return list;
}

/// Runs of the tokens that a side holds, whose sources are their positions.
std::vector<TransferRun> runs_of(const KVPageList& list, IndexRange tokens) {
  constexpr int64_t kOnePage[] = {0};
  const KVEntry one_page = {.num_bytes = 1, .item_len = 1};
  const KVPageList sequence = {
      .pages = kOnePage, .page_size = kMaxTokens + 1, .smallest = &one_page
  };
  return token_runs(sequence, list, tokens);
}

/// The tokens that a peer holds, in any pages.
std::vector<IndexRange> tokens_of_peer(
    const char* function, const KVLayout& peer, IndexRange tokens
) {
  const KVPlacement& placement = peer.placement();
  check(
      placement.shard_size == 1, function, ": peer must have all pages of its tokens, got ",
      "shard_size ", placement.shard_size
  );
  if (placement.dcp_size == 1) return {tokens};
  KVPageList list = list_of(function, peer, {});
  const int64_t num_pages = list.owned_below(tokens.end) / list.page_size + 1;
  std::vector<int64_t> pages(num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  const KVEntry all_pages = {.num_bytes = static_cast<uint64_t>(num_pages), .item_len = 1};
  list.pages = pages;
  list.smallest = &all_pages;
  std::vector<IndexRange> ranges;
  for (const TransferRun& run : runs_of(list, tokens)) {
    ranges.push_back({run.src, run.src + run.count});
  }
  return ranges;
}

}  // namespace

IndexRange tokens_of(const char* function, const KVLayout& layout, const KVTokenRange& range) {
  const CheckFor require(function);
  const KVPageList list = list_of(function, layout, range);
  const auto check_count = [&](const char* name, int64_t value) {
    require(value >= 0 && value <= kMaxTokens, name, " must be in [0, 2^48], got ", value);
  };
  check_count("start", range.start);
  check_count("first_token", range.first_token.value_or(0));
  check_count("num_tokens", range.num_tokens.value_or(0));
  require(
      std::ssize(range.pages) <= kMaxTokens / list.page_size,
      "pages must hold at most 2^48 tokens, got ", range.pages.size(), " of ", list.page_size
  );
  const int64_t cycle = list.dcp_size == 1 ? 1 : list.dcp_size * list.dcp_interleave;
  require(
      range.start % cycle == 0 && list.owned_below(range.start) % list.page_size == 0,
      "start must be the first token of a page of ", list.page_size,
      list.dcp_size > 1 ? " on every DCP rank" : "", ", got ", range.start
  );
  require(
      range.num_tokens || list.dcp_size == 1, "num_tokens must be given with dcp_size ",
      list.dcp_size
  );
  const int64_t first = range.first_token.value_or(range.start);
  const int64_t end = range.num_tokens ? first + *range.num_tokens : range.start + list.num_rows();
  check_holds(list, {first, end});
  return {first, end};
}

std::vector<HeldTokens> held_tokens(
    const char* function, const KVLayout& layout, const KVTokenRange& range, const KVLayout* peer
) {
  const IndexRange tokens = tokens_of(function, layout, range);
  const KVPageList list = list_of(function, layout, range);
  if (!list.smallest) return {};
  std::vector<HeldTokens> held;
  const auto wanted = peer ? tokens_of_peer(function, *peer, tokens) : std::vector{tokens};
  for (const TransferRun& run : runs_of(list, tokens)) {
    const IndexRange own = {run.src, run.src + run.count};
    // The first range that ends after the begin of the run; ranges ascend and are disjoint.
    auto range_of = std::upper_bound(
        wanted.begin(), wanted.end(), own.begin,
        [](int64_t token, IndexRange other) { return token < other.end; }
    );
    for (; range_of != wanted.end() && range_of->begin < own.end; ++range_of) {
      const IndexRange both = intersect(own, *range_of);
      if (both.size() == 0) continue;
      held.push_back({both.begin, run.dst + both.begin - run.src, both.size()});
    }
  }
  return held;
}

}  // namespace cpattn
