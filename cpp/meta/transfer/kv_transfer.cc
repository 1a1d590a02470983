// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_transfer.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "cpattn/base/check.h"
#include "meta/transfer/kv_link.h"
#include "meta/transfer/page_runs.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_kv_transfer";
constexpr int64_t kMaxTokens = int64_t{1} << 48;  // sums and products of few stay in int64

void check_token(const char* name, int64_t value) {
  check(
      value >= 0 && value <= kMaxTokens, kFunction, ": ", name, " must be in [0, 2^48], got ", value
  );
}

void check_start(const char* name, int64_t start, const KVPlacement& side) {
  check_token(name, start);
  const KVPageList list = {
      .dcp_rank = side.dcp_rank, .dcp_size = side.dcp_size, .dcp_interleave = side.dcp_interleave
  };
  const bool first_of_cycle =
      side.dcp_size == 1 || start % (side.dcp_size * side.dcp_interleave) == 0;
  check(
      first_of_cycle && list.owned_below(start) % side.page_size == 0, kFunction, ": ", name,
      " must be the first token of a page of ", side.page_size,
      side.dcp_size > 1 ? " on every DCP rank" : "", ", got ", start
  );
}

void check_range(const KVLayout& src, const KVLayout& dst, const KVTransferRange& range) {
  check(
      src.placement().dcp_size == 1, kFunction,
      ": source must hold all tokens of its pages, got dcp_size ", src.placement().dcp_size
  );
  check_start("src_start", range.src_start, src.placement());
  check_start("dst_start", range.dst_start, dst.placement());
  check_token("first_token", range.first_token.value_or(0));
  check_token("num_tokens", range.num_tokens.value_or(0));
  check(
      range.cp_size >= 1 && range.cp_size <= INT32_MAX && range.cp_rank >= 0 &&
          range.cp_rank < range.cp_size,
      kFunction, ": cp_rank must be in [0, cp_size), got ", range.cp_rank, " of ", range.cp_size
  );
}

KVPageList page_list(
    const char* side, const KVLayout& layout, std::span<const int64_t> pages, int64_t start
) {
  const KVPlacement& placement = layout.placement();
  check(
      std::ssize(pages) <= kMaxTokens / placement.page_size, kFunction, ": ", side,
      " pages must hold at most 2^48 tokens, got ", pages.size(), " of ", placement.page_size
  );
  return {
      .side = side,
      .pages = pages,
      .page_size = placement.page_size,
      .start = start,
      .dcp_rank = placement.dcp_rank,
      .dcp_size = placement.dcp_size,
      .dcp_interleave = placement.dcp_interleave,
      .shard_rank = placement.shard_rank,
      .shard_size = placement.shard_size,
  };
}

IndexRange all_tokens(const KVPageList& src, const KVPageList& dst, const KVTransferRange& range) {
  const int64_t first = range.first_token.value_or(std::max(src.start, dst.start));
  if (range.num_tokens) return {first, first + *range.num_tokens};
  check(dst.dcp_size == 1, kFunction, ": num_tokens must be given with dcp_size ", dst.dcp_size);
  const int64_t src_end = src.start + src.num_rows(), dst_end = dst.start + dst.num_rows();
  check(
      src_end == dst_end, kFunction,
      ": num_tokens must be given where the pages of both sides do not end at one token, got ",
      src.pages.size(), " of ", src.page_size, " at the source, ending at ", src_end, ", and ",
      dst.pages.size(), " of ", dst.page_size, " at the destination, ending at ", dst_end
  );
  return {first, src_end};
}

/// The tokens that this context-parallel rank sends, in whole pages of both sides.
IndexRange page_share(IndexRange tokens, int64_t page, int64_t cp_rank, int64_t cp_size) {
  const int64_t first = tokens.begin / page;
  const int64_t num_pages = (tokens.end + page - 1) / page - first;
  const auto border = [&](int64_t rank) { return (first + num_pages * rank / cp_size) * page; };
  return intersect(tokens, {border(cp_rank), border(cp_rank + 1)});
}

/// Whether every page that the source ranks send is sent whole.
bool goes_by_pages(const KVLinkSpec& link) {
  const int64_t page = link.from.page_size;
  return page == link.to.page_size && link.all_tokens.begin % page == 0 &&
         (link.to.dcp_size == 1 || link.to.dcp_interleave % page == 0) &&
         std::all_of(link.pairs.begin(), link.pairs.end(), [](const KVPair& pair) {
           return pair.whole_pages();
         });
}

/// Makes pages the units of a link that sends whole pages.
void count_in_pages(KVLinkSpec& link) {
  const int64_t page = link.from.page_size;
  link.tokens = {link.tokens.begin / page, (link.tokens.end + page - 1) / page};
  for (KVPageList* list : {&link.from, &link.to}) {
    list->start /= page;
    if (list->dcp_size > 1) list->dcp_interleave /= page;
    list->page_size = 1;
  }
}

void set_smallest(KVPageList& src, KVPageList& dst, const std::vector<KVPair>& pairs) {
  const auto take_smaller = [](const KVEntry*& smallest, const KVEntry* entry) {
    if (!smallest || entry->num_pages() < smallest->num_pages()) smallest = entry;
  };
  for (const KVPair& pair : pairs) {
    take_smaller(src.smallest, pair.src);
    take_smaller(dst.smallest, pair.dst);
  }
}

/// A pair whose units are pages.
TransferEntry page_entry(const KVPair& pair) {
  return {
      .src_addr = pair.src->addr,
      .dst_addr = pair.dst->addr,
      .src_stride = pair.src->stride(),
      .dst_stride = pair.dst->stride(),
      .bytes = pair.src->item_len,
  };
}

/// The bytes of one side that a pair sends: their begin in the first page, and their strides.
struct SentRows {
  uint64_t addr = 0;
  uint64_t head_bytes = 0;  // of all heads, if these are sent together
  PageShape shape;
};

SentRows sent_rows(const KVLayout& layout, const KVEntry& entry, const KVPair& pair) {
  const int64_t page_size = layout.placement().page_size;
  const uint64_t row = entry.item_len / page_size;
  SentRows rows = {entry.addr, row, {page_size, entry.stride(), row, row}};
  if (pair.whole_rows && !pair.by_heads()) return rows;
  const IndexRange heads = layout.heads(entry.kind);
  rows.head_bytes = rows.shape.head_stride = row / heads.size();
  if (layout.heads_first(entry)) {
    rows.shape.token_stride = rows.head_bytes;
    rows.shape.head_stride = rows.head_bytes * page_size;
  }
  rows.addr += (pair.heads.begin - heads.begin) * rows.shape.head_stride;
  return rows;
}

/// Runs of bytes, for pairs whose units are not slots.
using ByteRuns = std::map<PairShape, std::vector<TransferRun>>;

/// A pair whose units are the shared heads of a token or, if these lie apart or other bytes lie
/// between pages, single bytes.
TransferEntry token_entry(
    const KVPair& pair,
    const KVLayout& src,
    const KVLayout& dst,
    std::span<const TransferRun> slots,
    ByteRuns& byte_runs_of
) {
  const KVEntry &from = *pair.src, &to = *pair.dst;
  check(
      from.token_rows && from.item_len % src.placement().page_size == 0, kFunction, ": ", from,
      " is not rows of tokens, so only whole pages of both sides may go: give first_token and ",
      "interleave in multiples of page_size ", src.placement().page_size
  );
  const SentRows read = sent_rows(src, from, pair), write = sent_rows(dst, to, pair);
  PairShape shape = {.src = read.shape, .dst = write.shape, .bytes = read.head_bytes};
  if (pair.by_heads()) shape.num_heads = pair.heads.size();
  if (!pair.by_heads() && !pair.whole_rows) shape.bytes *= pair.heads.size();
  TransferEntry entry = {
      .src_addr = read.addr,
      .dst_addr = write.addr,
      .src_stride = read.shape.token_stride,
      .dst_stride = write.shape.token_stride,
      .bytes = shape.bytes,
  };
  const bool dense = from.stride() == from.item_len && to.stride() == to.item_len;
  if (dense && !pair.by_heads()) return entry;
  const auto [found, is_new] = byte_runs_of.try_emplace(shape);
  if (is_new) found->second = byte_runs(shape, slots);
  entry.src_stride = entry.dst_stride = entry.bytes = 1;
  entry.runs = &found->second;
  return entry;
}

const char* part_name(const KVEntry& entry) {
  constexpr const char* kDraft[] = {"draft k",     "draft v",       "draft index_k",
                                    "draft state", "draft k_scale", "draft v_scale"};
  return entry.is_draft ? kDraft[static_cast<int>(entry.kind)] : kv_kind_name(entry.kind);
}

}  // namespace

KVLinkSpec specify_link(
    const KVLayout& src,
    const KVLayout& dst,
    std::span<const int64_t> src_pages,
    std::span<const int64_t> dst_pages,
    const KVTransferRange& range
) {
  check_range(src, dst, range);
  KVLinkSpec link = {
      .from = page_list("source", src, src_pages, range.src_start),
      .to = page_list("destination", dst, dst_pages, range.dst_start),
  };
  link.all_tokens = link.tokens = all_tokens(link.from, link.to, range);
  check_holds(link.from, link.all_tokens);
  check_holds(link.to, link.all_tokens);
  link.pairs = pair_entries(src, dst);
  if (range.cp_share == CpShare::layers) {
    keep_layer_share(link.pairs, range.cp_rank, range.cp_size);
  } else {
    const int64_t page = std::lcm(link.from.page_size, link.to.page_size);
    link.tokens = page_share(link.tokens, page, range.cp_rank, range.cp_size);
  }
  // Tokens that this rank sends and that fill pages from the first on meet in `token_runs`.
  const bool is_striped = link.from.shard_size > 1 || link.to.shard_size > 1;
  if (is_striped || link.tokens != link.all_tokens || link.to.rows(link.tokens).begin > 0) {
    check_pages_distinct(link.to, link.all_tokens);
  }
  link.sent = tokens_of_shard(link.from, link.tokens);
  return link;
}

TransferPlan plan_link(KVLinkSpec link, const KVLayout& src, const KVLayout& dst) {
  std::erase_if(link.pairs, [](const KVPair& pair) { return pair.is_elided(); });
  if (link.pairs.empty()) return TransferPlan(0);
  set_smallest(link.from, link.to, link.pairs);
  const bool by_pages = goes_by_pages(link);
  if (by_pages) count_in_pages(link);
  const std::vector<TransferRun> runs = token_runs(link.from, link.to, link.tokens);
  ByteRuns byte_runs_of;
  std::vector<TransferEntry> entries;
  entries.reserve(link.pairs.size());
  for (const KVPair& pair : link.pairs) {
    entries.push_back(
        by_pages ? page_entry(pair) : token_entry(pair, src, dst, runs, byte_runs_of)
    );
    entries.back().part = part_name(*pair.src);
  }
  return make_transfer_plan(entries, runs);
}

TransferPlan plan_kv_transfer(
    const KVLayout& src,
    const KVLayout& dst,
    std::span<const int64_t> src_pages,
    std::span<const int64_t> dst_pages,
    const KVTransferRange& range
) {
  return plan_link(specify_link(src, dst, src_pages, dst_pages, range), src, dst);
}

}  // namespace cpattn
