// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_layout.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <ostream>
#include <tuple>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "KVLayout";
constexpr const char* kKindNames[] = {"k", "v", "index_k", "state", "k_scale", "v_scale"};
constexpr std::size_t kMaxName = 40;

auto key(const KVEntry& entry) { return std::tuple(entry.is_draft, entry.layer_id, entry.kind); }

void check_rank(const char* group, int64_t rank, int64_t size) {
  check(
      size >= 1 && size <= INT32_MAX, kFunction, ": ", group, "_size must be in [1, ", INT32_MAX,
      "], got ", size
  );
  check(
      rank >= 0 && rank < size, kFunction, ": ", group, "_rank must be in [0, ", size, "), got ",
      rank
  );
}

void check_placement(const KVPlacement& placement) {
  const auto& [page_size, tp_rank, tp_size, heads, layers, dcp_rank, dcp_size, interleave, shard_rank, shard_size] =
      placement;
  check_page_size(kFunction, page_size);
  check_rank("tp", tp_rank, tp_size);
  check_rank("dcp", dcp_rank, dcp_size);
  check_rank("shard", shard_rank, shard_size);
  check(
      shard_size == 1 || dcp_size == 1, kFunction, ": dcp_size must be 1 with shard_size ",
      shard_size, ", got ", dcp_size
  );
  check(
      interleave >= 1 && interleave <= INT32_MAX, kFunction, ": dcp_interleave must be in [1, ",
      INT32_MAX, "], got ", interleave
  );
  check(
      heads || tp_size == 1, kFunction, ": total_kv_heads must be given with tp_size ", tp_size,
      ", 1 for an MLA latent"
  );
  check(
      !heads ||
          (*heads >= 1 && *heads <= INT32_MAX && (*heads % tp_size == 0 || tp_size % *heads == 0)),
      kFunction, ": total_kv_heads must divide tp_size ", tp_size, " or be a multiple of it, got ",
      heads.value_or(0)
  );
  check(
      !layers || (layers->begin >= 0 && layers->begin <= layers->end), kFunction,
      ": layers must be 0 <= first <= end, got ", layers.value_or(IndexRange{})
  );
}

/// Checks that the bytes of an entry are those of its pages.
void check_pages(const KVEntry& entry) {
  check(
      !entry.page_stride || (*entry.page_stride >= std::max<uint64_t>(entry.item_len, 1) &&
                             *entry.page_stride <= INT64_MAX),
      kFunction, ": page_stride of ", entry, " must be in [item_len ", entry.item_len,
      ", 2^63), got ", entry.stride()
  );
  const uint64_t bytes = entry.num_bytes;
  const bool is_whole = bytes == 0 || (!entry.is_elided() && bytes >= entry.item_len &&
                                       (bytes - entry.item_len) % entry.stride() == 0);
  check(
      is_whole && bytes <= INT64_MAX, kFunction, ": nbytes of ", entry, " must be ",
      entry.page_stride
          ? concat("a multiple of page_stride ", *entry.page_stride, " and, of the ", "last page, ")
          : "a multiple of ",
      "item_len ", entry.item_len, " below 2^63, got ", bytes
  );
}

void check_entry(const KVEntry& entry, const KVPlacement& placement) {
  check(entry.layer_id >= 0, kFunction, ": layer_id must be >= 0, got ", entry);
  check(
      entry.is_draft || !placement.layers || placement.layers->contains(entry.layer_id), kFunction,
      ": ", entry, " must lie within layers ", placement.layers.value_or(IndexRange{})
  );
  const bool may_be_left_out = entry.kind == KVKind::index_k || entry.kind == KVKind::state;
  check(
      entry.item_len >= (may_be_left_out ? 0 : 1) && entry.item_len <= INT64_MAX, kFunction,
      ": item_len of ", entry, " must be in [", may_be_left_out ? 0 : 1, ", 2^63), got ",
      entry.item_len
  );
  check_pages(entry);
  check(
      entry.dtype.size() <= kMaxName, kFunction, ": dtype of ", entry, " must be at most ",
      kMaxName, " characters, got ", entry.dtype.size()
  );
  check(
      entry.layout_tag.size() <= kMaxName && (entry.layout_tag.empty() || !entry.token_rows),
      kFunction, ": layout_tag of ", entry, " must be at most ", kMaxName,
      " characters, and without token_rows, got ", entry.layout_tag.size(), " and ",
      entry.token_rows ? "token_rows" : "none"
  );
  check(
      entry.num_bytes == 0 || entry.addr <= UINT64_MAX - (entry.num_bytes - 1), kFunction,
      ": addr + nbytes of ", entry, " must not pass 2^64, got ", entry.addr, " + ", entry.num_bytes
  );
}

/// Checks that pages of order HND are rows of a known number of heads.
void check_order(const KVEntry& entry, const KVLayout& layout) {
  if (entry.kv_layout == KVAxisOrder::nhd || entry.is_elided()) return;
  const KVPlacement& placement = layout.placement();
  check(
      entry.token_rows, kFunction, ": kv_layout of ", entry,
      " must be 'NHD' without token_rows, got 'HND'"
  );
  const bool one_head = entry.kind == KVKind::index_k || entry.kind == KVKind::state;
  check(
      one_head || placement.total_kv_heads, kFunction,
      ": total_kv_heads must be given with kv_layout 'HND', as of ", entry
  );
  const int64_t num_heads = layout.heads(entry.kind).size();
  const auto rows = static_cast<uint64_t>(placement.page_size * num_heads);
  check(
      entry.item_len % rows == 0, kFunction, ": item_len of ", entry, " must be a multiple of ",
      "page_size ", placement.page_size, " * ", num_heads, " head(s), got ", entry.item_len
  );
}

uint64_t last_byte(const KVEntry& entry) { return entry.addr + (entry.num_bytes - 1); }

using Pair = std::pair<uint32_t, uint32_t>;

/// Returns two entries of a group, in ascending addresses, that overlap modulo the greatest common
/// divisor of all strides. An entry of one page has no stride.
std::optional<Pair> find_overlap(
    const std::vector<KVEntry>& entries, std::span<const uint32_t> group
) {
  uint64_t stride = 0;
  for (const uint32_t i : group) {
    if (entries[i].num_pages() > 1) stride = std::gcd(stride, entries[i].stride());
  }
  if (stride == 0) return Pair(group[0], group[1]);
  std::vector<std::pair<uint64_t, uint32_t>> begins;
  begins.reserve(group.size());
  for (const uint32_t i : group) {
    begins.emplace_back((entries[i].addr - entries[group[0]].addr) % stride, i);
  }
  std::sort(begins.begin(), begins.end());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const auto& [begin, entry] = begins[i];
    const bool is_last = i + 1 == begins.size();
    const uint64_t end = is_last ? stride : begins[i + 1].first;
    if (end - begin < entries[entry].item_len)
      return Pair(entry, begins[is_last ? 0 : i + 1].second);
  }
  return std::nullopt;
}

/// Looks for an overlap within each group of entries whose address ranges intersect.
std::optional<Pair> find_overlap(const std::vector<KVEntry>& entries) {
  std::vector<uint32_t> order;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].num_bytes > 0) order.push_back(static_cast<uint32_t>(i));
  }
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(entries[a].addr, a) < std::pair(entries[b].addr, b);
  });
  for (std::size_t first = 0, end = 0; first < order.size(); first = end) {
    uint64_t last = last_byte(entries[order[first]]);
    for (end = first + 1; end < order.size() && entries[order[end]].addr <= last; ++end) {
      last = std::max(last, last_byte(entries[order[end]]));
    }
    if (end - first == 1) continue;
    if (auto found = find_overlap(entries, std::span(order).subspan(first, end - first))) {
      return found;
    }
  }
  return std::nullopt;
}

}  // namespace

const char* kv_kind_name(KVKind kind) { return kKindNames[static_cast<int>(kind)]; }

KVKind parse_kv_kind(const char* function, std::string_view name) {
  const auto* const found = std::find(std::begin(kKindNames), std::end(kKindNames), name);
  check(
      found != std::end(kKindNames), function,
      ": kind must be k, v, index_k, state, k_scale or v_scale, got \"", name, "\""
  );
  return static_cast<KVKind>(found - kKindNames);
}

std::ostream& operator<<(std::ostream& out, const KVEntry& entry) {
  return out << kv_kind_name(entry.kind) << " of " << (entry.is_draft ? "draft " : "") << "layer "
             << entry.layer_id;
}

KVLayout::KVLayout(std::vector<KVEntry> entries, const KVPlacement& placement)
    : placement_(placement), entries_(std::move(entries)), sorted_(entries_.size()) {
  check_placement(placement_);
  for (const KVEntry& entry : entries_) check_entry(entry, placement_);
  for (const KVEntry& entry : entries_) check_order(entry, *this);
  overlap_ = find_overlap(entries_);
  std::iota(sorted_.begin(), sorted_.end(), 0u);
  std::sort(sorted_.begin(), sorted_.end(), [this](uint32_t a, uint32_t b) {
    return std::tuple(key(entries_[a]), a) < std::tuple(key(entries_[b]), b);
  });
  for (std::size_t i = 1; i < sorted_.size(); ++i) {
    const KVEntry& entry = entries_[sorted_[i]];
    check(
        key(entry) != key(entries_[sorted_[i - 1]]), kFunction, ": entries must be distinct, got ",
        entry, " at index ", sorted_[i - 1], " and at index ", sorted_[i]
    );
  }
}

const KVEntry* KVLayout::find(const KVEntry& like) const {
  const auto found = std::lower_bound(
      sorted_.begin(), sorted_.end(), key(like),
      [this](uint32_t i, const auto& wanted) { return key(entries_[i]) < wanted; }
  );
  if (found == sorted_.end() || key(entries_[*found]) != key(like)) return nullptr;
  return &entries_[*found];
}

std::optional<std::pair<const KVEntry*, const KVEntry*>> KVLayout::overlap() const {
  if (!overlap_) return std::nullopt;
  return std::pair(&entries_[overlap_->first], &entries_[overlap_->second]);
}

bool KVLayout::has_draft() const { return !sorted_.empty() && entries_[sorted_.back()].is_draft; }

int64_t KVLayout::total_heads(KVKind kind) const {
  const bool one_head = kind == KVKind::index_k || kind == KVKind::state;
  return one_head ? 1 : placement_.total_kv_heads.value_or(1);
}

int64_t KVLayout::num_replicas(KVKind kind) const {
  return std::max<int64_t>(1, placement_.tp_size / total_heads(kind));
}

IndexRange KVLayout::heads(KVKind kind) const {
  const int64_t count = std::max<int64_t>(1, total_heads(kind) / placement_.tp_size);
  const int64_t first = placement_.tp_rank / num_replicas(kind) * count;
  return {first, first + count};
}

}  // namespace cpattn
