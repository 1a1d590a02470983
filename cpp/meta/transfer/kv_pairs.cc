// SPDX-License-Identifier: Apache-2.0
#include "meta/transfer/kv_pairs.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_kv_transfer";

struct Side {
  const char* name;
  const KVLayout& layout;
};

/// Checks that buffers of one layer and kind hold the same kind of numbers, in an order of the same
/// name, on both sides.
void check_bytes(const KVLayout& src, const KVLayout& dst) {
  for (const KVEntry& from : src.entries()) {
    const KVEntry* to = dst.find(from);
    check(
        to == nullptr || from.dtype.empty() || to->dtype.empty() || from.dtype == to->dtype,
        kFunction, ": ", from, " must have one dtype on both sides, got ", from.dtype,
        " at the source and ", to == nullptr ? "" : to->dtype, " at the destination"
    );
    check(
        to == nullptr || from.layout_tag == to->layout_tag, kFunction, ": ", from,
        " must have one layout_tag on both sides, got \"", from.layout_tag,
        "\" at the source and \"", to == nullptr ? "" : to->layout_tag, "\" at the destination"
    );
  }
}

bool has_layer(const KVLayout& layout, const KVEntry& like) {
  const auto entries = layout.entries();
  return std::any_of(entries.begin(), entries.end(), [&](const KVEntry& entry) {
    return entry.layer_id == like.layer_id && entry.is_draft == like.is_draft;
  });
}

/// Checks that `to` has every required counterpart of the entries of `from`.
void check_counterparts(const Side& from, const Side& to, bool with_draft) {
  for (const KVEntry& entry : from.layout.entries()) {
    const bool shared = entry.is_draft ? with_draft : to.layout.answers_for(entry);
    if (!shared || to.layout.find(entry) != nullptr) continue;
    const bool other_stage = !entry.is_draft && !has_layer(to.layout, entry);
    check(
        false, kFunction, ": ", from.name, " has ", entry, " (item_len ", entry.item_len,
        "), which ", to.name, " has not",
        other_stage ? "; a pipeline stage must state its layers" : ""
    );
  }
}

bool is_sliceable(const KVEntry& entry, int64_t page_size, int64_t num_heads) {
  return entry.token_rows && entry.item_len % static_cast<uint64_t>(page_size * num_heads) == 0;
}

/// Checks that the pages of a pair are equally long, or else are rows whose heads are.
void check_lengths(const KVLayout& src, const KVLayout& dst, const KVPair& pair) {
  const KVEntry &from = *pair.src, &to = *pair.dst;
  const int64_t src_page = src.placement().page_size, dst_page = dst.placement().page_size;
  const bool one_row = pair.whole_rows && !pair.by_heads();
  const int64_t src_heads = one_row ? 1 : src.heads(from.kind).size();
  const int64_t dst_heads = one_row ? 1 : dst.heads(to.kind).size();
  bool ok = from.token_rows == to.token_rows;
  if (one_row && src_page == dst_page) {
    ok = ok && from.item_len == to.item_len;
  } else {
    ok = ok && is_sliceable(from, src_page, src_heads) && is_sliceable(to, dst_page, dst_heads) &&
         from.item_len / (src_page * src_heads) == to.item_len / (dst_page * dst_heads);
  }
  check(
      ok, kFunction, ": ", from, " must have the same bytes for each token and head on both sides",
      from.token_rows && to.token_rows ? "" : ", and whole pages if not rows of tokens",
      ", got item_len ", from.item_len, " for page_size ", src_page, " and ", src_heads,
      " head(s) at the source, and ", to.item_len, " for ", dst_page, " and ", dst_heads,
      " at the destination"
  );
}

bool has_all_heads(const KVLayout& layout, KVKind kind) {
  return layout.heads(kind).size() == layout.total_heads(kind);
}

/// Sets the heads of a pair. Two sides with all heads next to each other in token rows need not
/// agree on the size of a head.
void set_heads(KVPair& pair, const KVLayout& src, const KVLayout& dst) {
  const KVKind kind = pair.src->kind;
  const bool all = has_all_heads(src, kind) && has_all_heads(dst, kind);
  pair.src_heads_first = src.heads_first(*pair.src);
  pair.dst_heads_first = dst.heads_first(*pair.dst);
  check(
      (all && !pair.by_heads()) || src.total_heads(kind) == dst.total_heads(kind), kFunction,
      ": total_kv_heads must be the same on both sides, got ", src.total_heads(kind),
      " at the source and ", dst.total_heads(kind), " at the destination"
  );
  // Shares of one size are the same or have nothing in common.
  pair.whole_rows = all || src.heads(kind).size() == dst.heads(kind).size();
  const int64_t sender = dst.placement().tp_rank % src.num_replicas(kind);
  if (src.replica(kind) != sender) return;
  pair.heads = all ? dst.heads(kind) : intersect(src.heads(kind), dst.heads(kind));
}

/// Checks that no two buffers of the destination overlap, including buffers that other links write.
void check_apart(const KVLayout& dst) {
  const auto overlap = dst.overlap();
  if (!overlap) return;
  const auto& [a, b] = *overlap;
  const auto pages = [](const KVEntry& entry) {
    return entry.page_stride ? concat(", pages of ", entry.item_len, " every ", *entry.page_stride)
                             : "";
  };
  check(
      false, kFunction, ": destination buffers must not overlap, got ", *a, " at ", a->addr, " + ",
      a->num_bytes, pages(*a), " and ", *b, " at ", b->addr, pages(*b)
  );
}

}  // namespace

std::vector<KVPair> pair_entries(const KVLayout& src, const KVLayout& dst) {
  const bool with_draft = src.has_draft() && dst.has_draft();
  check_bytes(src, dst);
  check_counterparts({"source", src}, {"destination", dst}, with_draft);
  check_counterparts({"destination", dst}, {"source", src}, with_draft);
  check_apart(dst);
  std::vector<KVPair> pairs;
  pairs.reserve(src.entries().size());
  for (const KVEntry& entry : src.entries()) {
    const bool shared = entry.is_draft ? with_draft : dst.answers_for(entry);
    if (!shared) continue;
    KVPair pair = {.src = &entry, .dst = dst.find(entry)};
    set_heads(pair, src, dst);
    if (!pair.is_elided()) check_lengths(src, dst, pair);
    if (pair.heads.size() > 0) pairs.push_back(pair);
  }
  return pairs;
}

void keep_layer_share(std::vector<KVPair>& pairs, int64_t cp_rank, int64_t cp_size) {
  using Layer = std::pair<bool, int64_t>;
  const auto layer_of = [](const KVPair& pair) {
    return Layer(pair.src->is_draft, pair.src->layer_id);
  };
  std::vector<Layer> layers;
  layers.reserve(pairs.size());
  for (const KVPair& pair : pairs) layers.push_back(layer_of(pair));
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  const auto num_layers = static_cast<int64_t>(layers.size());
  const IndexRange share = {num_layers * cp_rank / cp_size, num_layers * (cp_rank + 1) / cp_size};
  std::erase_if(pairs, [&](const KVPair& pair) {
    return !share.contains(
        std::lower_bound(layers.begin(), layers.end(), layer_of(pair)) - layers.begin()
    );
  });
}

}  // namespace cpattn
