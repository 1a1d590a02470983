// SPDX-License-Identifier: Apache-2.0
#include "cpattn/distributed/key_share.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr CheckFor check_keys("BatchKeys");
constexpr CheckFor check_share("KeyShare");
constexpr int64_t kLargestPage = 64;  // rows; kernels gain nothing from larger ones

/// Whether runs of run_len slots lie on one rank in consecutive rows, from a multiple of run_len
/// on.
bool are_runs(const PlacedSlots& placed, int64_t run_len) {
  const auto size = static_cast<int64_t>(placed.owners.size());
  for (int64_t i = 0; i < size; ++i) {
    const bool begins = i % run_len == 0;
    if (begins
            ? placed.rows[i] % run_len != 0
            : placed.owners[i] != placed.owners[i - 1] || placed.rows[i] != placed.rows[i - 1] + 1)
      return false;
  }
  return true;
}

void check_placed(const BatchPages& pages, int64_t num_ranks, const PlacedSlots& placed) {
  check_keys(
      num_ranks >= 1 && num_ranks <= kMaxShardSize, "num_ranks must be in [1, ", kMaxShardSize,
      "], got ", num_ranks
  );
  const std::size_t size = placed.pages.size() * pages.page_size;
  check_keys(
      placed.owners.size() == size && placed.rows.size() == size,
      "owners and rows must have each of the ", size, " slots of pages, got ", placed.owners.size(),
      " and ", placed.rows.size()
  );
  for (std::size_t i = 0; i < size; ++i) {
    const int64_t owner = placed.owners[i], row = placed.rows[i];
    check_keys(
        owner >= 0 && owner < num_ranks, "owners must be in [0, ", num_ranks, "), got ", owner,
        " at index ", i
    );
    check_keys(
        row >= 0 && row < INT64_MAX, "rows must be >= 0 and fit int64, got ", row, " at index ", i
    );
  }
}

}  // namespace

BatchKeys::BatchKeys(std::shared_ptr<const BatchPages> pages, const Interleave& interleave)
    : pages_(std::move(pages)), interleave_(interleave) {
  check_interleave(interleave, "BatchKeys", "run_len");
  run_len_ = std::gcd(pages_->page_size, interleave.run_len);
}

BatchKeys::BatchKeys(
    std::shared_ptr<const BatchPages> pages, int64_t num_ranks, const PlacedSlots& placed
)
    : pages_(std::move(pages)), interleave_{.shard_size = num_ranks} {
  check_placed(*pages_, num_ranks, placed);
  const int64_t page_size = pages_->page_size;
  run_len_ = page_size;
  while (page_size % run_len_ != 0 || !are_runs(placed, run_len_)) --run_len_;
  const int64_t runs = page_size / run_len_;
  owners_.reserve(pages_->ids.size() * runs);
  rows_.reserve(owners_.capacity());
  for (const int32_t page : pages_->ids) {
    const auto place = std::lower_bound(placed.pages.begin(), placed.pages.end(), page);
    check_keys(
        place != placed.pages.end() && *place == page, "pages must be ascending, with page ", page
    );
    int64_t slot = (place - placed.pages.begin()) * page_size;
    for (int64_t run = 0; run < runs; ++run, slot += run_len_) {
      owners_.push_back(placed.owners[slot]);
      rows_.push_back(placed.rows[slot]);
    }
  }
}

int64_t BatchKeys::rows_below(int64_t rank, int64_t slot) const {
  const auto [size, run_len] = interleave_;
  const int64_t cycle = size * run_len;
  return slot / cycle * run_len + std::clamp<int64_t>(slot % cycle - rank * run_len, 0, run_len);
}

KeyShare::KeyShare(std::shared_ptr<const BatchKeys> keys, std::vector<int64_t> ranks)
    : keys_(std::move(keys)), ranks_(std::move(ranks)), is_member_(keys_->num_ranks()) {
  int64_t least = 0;
  for (const int64_t rank : ranks_) {
    check_share(
        rank >= least && rank < keys_->num_ranks(), "ranks must be ascending and in [0, ",
        keys_->num_ranks(), "), got ", rank
    );
    least = rank + 1;
    is_member_[rank] = 1;
  }
  const BatchPages& pages = keys_->pages();
  const bool placed = !keys_->owners_.empty();
  const auto [size, run_len] = keys_->interleave_;
  const auto num_shared = static_cast<int64_t>(ranks_.size());
  unit_len_ = placed ? keys_->run_len() : pages.page_size;
  if (num_shared == size) {
    uniform_ = unit_len_;
  } else if (!placed && pages.page_size % (size * run_len) == 0) {
    uniform_ = pages.page_size / size * num_shared;
  }
  if (uniform_ > 0) return;
  const auto units = static_cast<int64_t>(placed ? keys_->owners_.size() : pages.ids.size());
  before_.resize(units + 1);
  for (int64_t unit = 0; unit < units; ++unit) {
    before_[unit + 1] = before_[unit] + unit_count(unit, unit_len_);
  }
}

/// The rank that has all slots of a unit, or -1 if several ranks have some.
inline int64_t KeyShare::owner_of(int64_t unit) const {
  if (!keys_->owners_.empty()) return keys_->owners_[unit];
  const auto [size, run_len] = keys_->interleave_;
  if (run_len % unit_len_ != 0) return -1;
  const int32_t page = keys_->pages().ids[unit];  // in 32 bits, which divide faster
  const auto run =
      static_cast<uint32_t>(run_len == unit_len_ ? page : page / (run_len / unit_len_));
  return run % static_cast<uint32_t>(size);
}

/// Keys of the share among the first `length` ones of a unit.
inline int64_t KeyShare::unit_count(int64_t unit, int64_t length) const {
  if (const int64_t owner = owner_of(unit); owner >= 0) return has(owner) ? length : 0;
  const auto [size, run_len] = keys_->interleave_;
  const bool aligned = unit_len_ % (size * run_len) == 0;
  const int64_t begin = aligned ? 0 : keys_->pages().ids[unit] * unit_len_;
  int64_t count = 0;
  for (const int64_t rank : ranks_) {
    count += keys_->rows_below(rank, begin + length) - keys_->rows_below(rank, begin);
  }
  return count;
}

int64_t KeyShare::count_below(int64_t request, int64_t position) const {
  const BatchPages& pages = keys_->pages();
  assert(position >= 0 && position <= pages.kv_lens[request]);
  const int64_t first = pages.indptr[request] * (pages.page_size / unit_len_);
  const int64_t unit = first + position / unit_len_, rest = position % unit_len_;
  const int64_t whole = units_before(unit) - units_before(first);
  return rest == 0 ? whole : whole + unit_count(unit, rest);  // no unit follows the last
}

/// Calls visit(position, count, row) for keys of the share that follow each other on one rank.
template <class Visit>
void KeyShare::for_each_run(int64_t request, Visit visit) const {
  const BatchPages& pages = keys_->pages();
  const int64_t len = pages.kv_lens[request];
  if (!keys_->owners_.empty()) {
    int64_t unit = pages.indptr[request] * (pages.page_size / unit_len_);
    for (int64_t position = 0; position < len; position += unit_len_, ++unit) {
      if (!has(keys_->owners_[unit])) continue;
      visit(position, std::min(unit_len_, len - position), keys_->rows_[unit]);
    }
    return;
  }
  const auto [size, run_len] = keys_->interleave_;
  const bool alone = ranks_.size() == 1;
  for (int64_t first = 0; first < len; first += pages.page_size) {
    const int64_t slot = pages.slot(request, first);
    const int64_t end = slot + std::min(pages.page_size, len - first);
    int64_t run = slot / run_len;
    if (alone) run += (ranks_[0] - run % size + size) % size;
    for (; run * run_len < end; run += alone ? size : 1) {
      if (!has(run % size)) continue;
      const int64_t begin = std::max(run * run_len, slot);
      const int64_t row = run / size * run_len + (begin - run * run_len);
      visit(first + (begin - slot), std::min(run * run_len + run_len, end) - begin, row);
    }
  }
}

/// Calls visit(row, count) for keys of one rank and one unit in consecutive rows. With an
/// interleave the keys of a page are consecutive.
template <class Visit>
void KeyShare::for_each_block(int64_t request, Visit visit) const {
  const BatchPages& pages = keys_->pages();
  if (!keys_->owners_.empty()) {
    for_each_run(request, [&visit](int64_t, int64_t count, int64_t row) { visit(row, count); });
    return;
  }
  const int64_t rank = ranks_[0];
  int64_t unit = pages.indptr[request];
  for (int64_t left = pages.kv_lens[request]; left > 0; left -= pages.page_size, ++unit) {
    const bool whole = left >= pages.page_size;
    const int64_t count =
        whole ? units_before(unit + 1) - units_before(unit) : unit_count(unit, left);
    if (count == 0) continue;
    const int64_t page = pages.ids[unit];
    visit(uniform_ > 0 ? page * uniform_ : keys_->rows_below(rank, page * pages.page_size), count);
  }
}

LocalKeys KeyShare::local_keys() const {
  LocalKeys keys;
  const int64_t bs = keys_->pages().bs();
  std::size_t total = 0;
  for (int64_t i = 0; i < bs; ++i) total += count(i);
  for (auto* values : {&keys.request, &keys.position, &keys.row}) values->resize(total);
  std::size_t next = 0;
  for (int64_t i = 0; i < bs; ++i) {
    for_each_run(i, [&](int64_t position, int64_t count, int64_t row) {
      for (int64_t k = 0; k < count; ++k, ++next) {
        keys.request[next] = i;
        keys.position[next] = position + k;
        keys.row[next] = row + k;
      }
    });
  }
  return keys;
}

/// Whether a rank's rows of every page fill whole pages of page_size rows of its own pool.
bool KeyShare::divides(int64_t page_size) const {
  return keys_->owners_.empty() && uniform_ > 0 && uniform_ % page_size == 0;
}

/// Whether every page of page_size rows, the runs' length times a power of two, has consecutive
/// rows.
bool KeyShare::fits(int64_t page_size) const {
  if (divides(page_size)) return true;
  for (int64_t i = 0; i < keys_->pages().bs(); ++i) {
    int64_t filled = 0, expected = 0;
    bool good = true;
    for_each_block(i, [&](int64_t row, int64_t count) {
      good = good && (filled == 0 ? row % page_size == 0 : row == expected);
      filled = (filled + count) % page_size;
      expected = row + count;
    });
    if (!good) return false;
  }
  return true;
}

LocalPages KeyShare::local_pages() const {
  check_share(ranks_.size() == 1, "local_pages is of one rank, got ", ranks_.size());
  const int64_t bs = keys_->pages().bs();
  int64_t size = keys_->run_len();
  for (int64_t larger = 2 * size; larger <= kLargestPage; larger *= 2) {
    if (keys_->pages().page_size % larger != 0 || !fits(larger)) break;
    size = larger;
  }
  LocalPages pages{.page_size = size, .indptr = {0}};
  for (int64_t i = 0; i < bs; ++i) {
    pages.indptr.push_back(pages.indptr.back() + (count(i) + size - 1) / size);
  }
  pages.ids.resize(pages.indptr.back());
  const bool divided = divides(size);
  for (int64_t i = 0; i < bs; ++i) {
    int64_t* id = pages.ids.data() + pages.indptr[i];
    const int64_t* end = pages.ids.data() + pages.indptr[i + 1];
    if (divided) {
      const int64_t parts = uniform_ / size;
      const int32_t* page = keys_->pages().ids.data() + keys_->pages().indptr[i];
      if (parts == 1) {
        std::copy(page, page + (end - id), id);
        continue;
      }
      for (; id != end; ++page) {
        for (int64_t k = 0; k < parts && id != end; ++k) *id++ = *page * parts + k;
      }
      continue;
    }
    int64_t filled = 0;  // of the last page
    for_each_block(i, [&](int64_t row, int64_t count) {
      int64_t begin = filled == 0 ? 0 : size - filled;
      filled = (filled + count) % size;
      if (begin >= count) return;
      for (int64_t page = (row + begin) / size; begin < count; begin += size) *id++ = page++;
    });
  }
  return pages;
}

int64_t KeyShare::row_of(int64_t request, int64_t position) const {
  const BatchPages& pages = keys_->pages();
  if (!keys_->owners_.empty()) {
    const int64_t first = pages.indptr[request] * (pages.page_size / unit_len_);
    const int64_t unit = first + position / unit_len_;
    return has(keys_->owners_[unit]) ? keys_->rows_[unit] + position % unit_len_ : -1;
  }
  const int64_t slot = pages.slot(request, position);
  const auto [size, run_len] = keys_->interleave_;
  const int64_t owner = slot / run_len % size;
  return has(owner) ? keys_->rows_below(owner, slot) : -1;
}

}  // namespace cpattn
