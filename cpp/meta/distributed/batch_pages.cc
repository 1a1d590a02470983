// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/batch_pages.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

/// The first new token of each request, then the number of new tokens.
std::vector<int64_t> token_offsets(const NewTokens& tokens) {
  std::vector<int64_t> offsets{0};
  offsets.reserve(tokens.q_lens.size() + 1);
  for (const int64_t q_len : tokens.q_lens) offsets.push_back(offsets.back() + q_len);
  return offsets;
}

/// Calls visit(first, slot, count) for the new tokens of each page: number, slot of the first.
template <class Visit>
void for_each_new_page(const BatchPages& pages, const NewTokens& tokens, Visit visit) {
  int64_t token = 0;
  for (int64_t i = 0; i < pages.bs(); ++i) {
    const int64_t end = pages.kv_lens[i];
    for (int64_t begin = end - tokens.q_lens[i]; begin < end;) {
      const int64_t count = std::min(pages.page_size - begin % pages.page_size, end - begin);
      visit(token, pages.slot(i, begin), count);
      token += count;
      begin += count;
    }
  }
}

/// Throws for the lowest slot that two tokens have; -1 is none.
void refuse_equal_slots(const char* function, std::span<const int64_t> slots) {
  std::vector<int64_t> ordered(slots.begin(), slots.end());
  std::sort(ordered.begin(), ordered.end());
  const auto begin = std::lower_bound(ordered.begin(), ordered.end(), 0);
  const auto shared = std::adjacent_find(begin, ordered.end());
  if (shared == ordered.end()) return;
  const auto first = std::find(slots.begin(), slots.end(), *shared);
  const auto second = std::find(first + 1, slots.end(), *shared);
  check(
      false, function, ": block_tables must give each new token a pool row of its own, got row ",
      *shared, " for tokens ", first - slots.begin(), " and ", second - slots.begin()
  );
}

/// Pages with new tokens, by open addressing, and the first of these tokens in each.
class NewPages {
 public:
  explicit NewPages(std::size_t most) : places_(std::bit_ceil(2 * most + 2)) {}

  /// False for a page that was added before.
  bool add(int64_t page, int64_t token) {
    Place& place = places_[place_of(page)];
    const bool is_added = place.page < 0;
    place.page = static_cast<int32_t>(page);
    place.first = std::min(place.first, token);
    return is_added;
  }
  /// The first new token of a page, counted from the page's begin; INT64_MAX for none.
  int64_t first(int64_t page) const { return places_[place_of(page)].first; }

 private:
  struct Place {
    int32_t page = -1;
    int64_t first = INT64_MAX;
  };

  /// The place of a page, or the free one that it would take.
  std::size_t place_of(int64_t page) const {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    const std::size_t mask = places_.size() - 1;
    std::size_t at = (static_cast<uint64_t>(page) * kOdd >> 32) & mask;
    while (places_[at].page >= 0 && places_[at].page != page) at = (at + 1) & mask;
    return at;
  }

  std::vector<Place> places_;
};

/// The pages with new tokens, and whether one of them has tokens of several requests.
std::pair<NewPages, bool> new_pages(const BatchPages& pages, const NewTokens& tokens) {
  std::size_t num_pages = 0;
  for_each_new_page(pages, tokens, [&](int64_t, int64_t, int64_t) { ++num_pages; });
  NewPages written(num_pages);
  bool is_shared = false;
  for_each_new_page(pages, tokens, [&](int64_t, int64_t slot, int64_t) {
    is_shared |= !written.add(slot / pages.page_size, slot % pages.page_size);
  });
  return {std::move(written), is_shared};
}

/// Copies the first pages of a row, and returns the OR of their bits: negative and large pages set
/// high bits.
template <class Int>
uint64_t read_row(const IndexTable& table, int64_t row, int64_t count, int32_t* ids) {
  const Int* values = static_cast<const Int*>(table.data) + row * table.row_stride;
  uint64_t all = 0;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t page = values[p * table.column_stride];
    all |= static_cast<uint64_t>(page);
    ids[p] = static_cast<int32_t>(page);
  }
  return all;
}

class Digest {
 public:
  void add(std::size_t lane, uint64_t word) {
    constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
    uint64_t& value = lanes_[lane % 4];
    value = (value ^ word) * kOdd;
    value ^= value >> 32;
  }
  uint64_t value(std::size_t count) {
    for (const uint64_t lane : {lanes_[1], lanes_[2], lanes_[3], uint64_t{count}}) add(0, lane);
    return lanes_[0];
  }

 private:
  uint64_t lanes_[4] = {1, 2, 3, 4};  // independent, so that they are computed at once
};

}  // namespace

BatchPages read_batch_pages(
    const char* function,
    const IndexTable& block_tables,
    std::span<const int64_t> kv_lens,
    int64_t page_size
) {
  const CheckFor require(function);
  require(page_size >= 1, "page_size must be >= 1, got ", page_size);
  BatchPages pages{.page_size = page_size, .kv_lens = {kv_lens.begin(), kv_lens.end()}};
  pages.indptr.push_back(0);
  int64_t most = 0;
  for (std::size_t i = 0; i < kv_lens.size(); ++i) {
    const int64_t len = kv_lens[i];
    require(len >= 0, "kv_lens must be >= 0, got ", len, " at index ", i);
    const int64_t count = len / page_size + (len % page_size != 0);
    most = std::max(most, count);
    pages.indptr.push_back(pages.indptr.back() + std::min(count, block_tables.columns));
  }
  require(
      block_tables.rows == pages.bs() && block_tables.columns >= most,
      "block_tables must be [bs, >= ceil(max(seq_lens) / page_size)] = [", pages.bs(),
      ", >= ", most, "], got shape [", block_tables.rows, ", ", block_tables.columns, "]"
  );
  pages.ids.resize(pages.indptr.back());
  for (int64_t i = 0; i < pages.bs(); ++i) {
    int32_t* ids = pages.ids.data() + pages.indptr[i];
    const int64_t count = pages.indptr[i + 1] - pages.indptr[i];
    const uint64_t all = block_tables.is_int64 ? read_row<int64_t>(block_tables, i, count, ids)
                                               : read_row<int32_t>(block_tables, i, count, ids);
    if (all <= INT32_MAX) continue;
    for (int64_t p = 0; p < count; ++p) {
      const int64_t page = block_tables.at(i, p);
      require(
          page >= 0 && page <= INT32_MAX, "block_tables must hold page ids, int32 and >= 0, got ",
          "block_tables[", i, ", ", p, "] = ", page
      );
    }
  }
  return pages;
}

PaddedTable padded_table(const BatchPages& pages, int64_t padding) {
  const int64_t bs = pages.bs();
  PaddedTable table;
  for (int64_t i = 0; i < bs; ++i) {
    table.columns = std::max(table.columns, pages.indptr[i + 1] - pages.indptr[i]);
  }
  if (bs == 0) return table;
  const int64_t padded = (pages.kv_lens.back() + padding + pages.page_size - 1) / pages.page_size;
  table.columns = std::max(table.columns, padded);
  table.values.assign(bs * table.columns, -1);
  int32_t* row = table.values.data();
  for (int64_t i = 0; i < bs; ++i, row += table.columns) {
    const auto ids = pages.ids.begin();
    std::copy(ids + pages.indptr[i], ids + pages.indptr[i + 1], row);
  }
  row -= table.columns;
  const int64_t used = pages.indptr[bs] - pages.indptr[bs - 1];
  std::fill(row + used, row + padded, used > 0 ? row[0] : 0);
  return table;
}

std::vector<int64_t> new_slots(const BatchPages& pages, const NewTokens& tokens) {
  std::vector<int64_t> slots(token_offsets(tokens).back() + tokens.padding, -1);
  for_each_new_page(pages, tokens, [&slots](int64_t first, int64_t slot, int64_t count) {
    for (int64_t i = 0; i < count; ++i) slots[first + i] = slot + i;
  });
  return slots;
}

TokenRows token_rows(
    const BatchPages& pages,
    const NewTokens& tokens,
    const std::optional<std::vector<int64_t>>& rows
) {
  const int64_t size = token_offsets(tokens).back() + tokens.padding;
  check(
      !rows || std::ssize(*rows) == size, "token_rows: rows must have each of the ", size,
      " tokens, got ", rows ? rows->size() : 0
  );
  TokenRows of;
  of.request.resize(size);
  of.position.resize(size);
  int64_t token = 0;
  for (int64_t i = 0; i < pages.bs(); ++i) {
    const int64_t padding = i + 1 == pages.bs() ? tokens.padding : 0;
    const int64_t end = pages.kv_lens[i] + padding;
    for (int64_t p = pages.kv_lens[i] - tokens.q_lens[i]; p < end; ++p, ++token) {
      const int64_t row = rows ? (*rows)[token] : token;
      check(
          row >= 0 && row < size, "token_rows: rows must be in [0, ", size, "), got ", row,
          " at index ", token
      );
      of.request[row] = i;
      of.position[row] = p;
    }
  }
  return of;
}

void refuse_shared_slots(const char* function, const BatchPages& pages, const NewTokens& tokens) {
  if (!new_pages(pages, tokens).second) return;
  const std::vector<int64_t> slots = new_slots(pages, tokens);
  refuse_equal_slots(function, std::span(slots).first(slots.size() - tokens.padding));
}

bool caches_new_tokens(const BatchPages& pages, const NewTokens& tokens) {
  const NewPages written = new_pages(pages, tokens).first;
  for (int64_t i = 0; i < pages.bs(); ++i) {
    const int64_t num_cached = pages.kv_lens[i] - tokens.q_lens[i];
    for (int64_t begin = 0; begin < num_cached; begin += pages.page_size) {
      const int64_t page = pages.slot(i, begin) / pages.page_size;
      if (written.first(page) < std::min(pages.page_size, num_cached - begin)) return true;
    }
  }
  return false;
}

uint64_t check_slots(
    const char* function,
    const BatchPages& pages,
    const NewTokens& tokens,
    std::span<const int64_t> slots
) {
  const CheckFor require(function);
  const std::vector<int64_t> own = new_slots(pages, tokens);
  require(
      slots.size() == own.size(), "out_cache_loc must have ", own.size(),
      " entries, one for each token, got ", slots.size()
  );
  const std::size_t num_real = own.size() - tokens.padding;
  Digest digest;
  std::size_t changed = 0;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == own[i]) continue;
    require(
        i >= num_real || slots[i] == -1, "out_cache_loc[", i, "] must be -1 or ", own[i],
        ", where the block tables have the token, got ", slots[i]
    );
    require(slots[i] >= -1, "out_cache_loc[", i, "] must be -1 or >= 0, got ", slots[i]);
    digest.add(0, i);
    digest.add(1, static_cast<uint64_t>(slots[i]));
    ++changed;
  }
  refuse_equal_slots(function, slots.first(num_real));
  return changed == 0 ? 0 : digest.value(changed);
}

uint64_t digest_of(std::span<const int32_t> values) {
  Digest digest;
  std::size_t i = 0;
  const auto word = [](int32_t low, int32_t high) {
    return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low);
  };
  for (; i + 8 <= values.size(); i += 8) {
    for (std::size_t lane = 0; lane < 4; ++lane) {
      digest.add(lane, word(values[i + 2 * lane], values[i + 2 * lane + 1]));
    }
  }
  for (; i < values.size(); ++i) digest.add(i, word(values[i], 0));
  return digest.value(values.size());
}

}  // namespace cpattn
