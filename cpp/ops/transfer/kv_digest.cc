// SPDX-License-Identifier: Apache-2.0
#include "cpattn/transfer/kv_digest.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/transfer/row_hash.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "digest";
constexpr CheckFor require(kFunction);
constexpr int64_t kItemBytes = int64_t{1} << 20;  // some 100 us of reading
constexpr int64_t kMaxSums = int64_t{1} << 28;

/// Rows of a buffer: bytes from `first` on, a step for each unit (token or page) and head.
struct Rows {
  KVEntryDigest* digest = nullptr;
  uint64_t first = 0;
  std::vector<uint64_t> keys;  // of each head
  int64_t unit_tokens = 1;     // page_size if a page is one row
  uint64_t token_step = 0;
  uint64_t head_step = 0;
};

/// Tokens of one run, for an item of work.
struct Piece {
  int64_t token, slot, count;
};

Rows rows_of(const KVLayout& layout, KVEntryDigest& digest, const KVLayout* peer) {
  const KVEntry& entry = *digest.entry;
  const int64_t page_size = layout.placement().page_size;
  const IndexRange own = layout.heads(entry.kind);
  IndexRange heads = peer ? intersect(own, peer->heads(entry.kind)) : own;
  Rows rows = {.digest = &digest, .first = entry.addr};
  if (!entry.token_rows) {
    rows.unit_tokens = page_size;
    heads = {own.begin, own.begin + 1};
    digest.row_bytes = static_cast<int64_t>(entry.item_len);
  } else {
    require(
        entry.item_len % static_cast<uint64_t>(page_size * own.size()) == 0, "item_len of ", entry,
        " must be a multiple of page_size ", page_size, " * ", own.size(), " head(s), got ",
        entry.item_len
    );
    const uint64_t row = entry.item_len / page_size / own.size();
    const bool heads_first = layout.heads_first(entry);
    rows.token_step = heads_first ? row : row * own.size();
    rows.head_step = heads_first ? row * page_size : row;
    rows.first += (heads.begin - own.begin) * rows.head_step;
    digest.row_bytes = static_cast<int64_t>(row);
  }
  const uint64_t key = entry_key(entry.layer_id, static_cast<uint64_t>(entry.kind), entry.is_draft);
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    rows.keys.push_back(head_key(key, head));
  }
  return rows;
}

/// Checks that tokens fill the pages of a buffer whose pages are one row each.
void check_whole_pages(
    const KVEntry& entry, std::span<const HeldTokens> held, int64_t page_size, int64_t end
) {
  for (const HeldTokens& run : held) {
    const int64_t last = run.token + run.count;
    require(
        run.slot % page_size == 0 && (run.count % page_size == 0 || last == end), entry,
        " is not rows of tokens, so tokens must be whole pages of ", page_size, ", got [",
        run.token, ", ", last, ")"
    );
  }
}

/// The blocks into which positions are divided, a sum for each.
struct Blocks {
  int64_t tokens;
  int64_t first;

  int64_t of(int64_t token) const { return token / tokens - first; }
  /// The number of tokens out of `count` from `token` on that are in its block.
  int64_t left(int64_t token, int64_t count) const {
    return std::min(count, tokens - token % tokens);
  }
};

/// The hashes of all heads of tokens that follow each other in a page, in the order of memory.
uint64_t sum_of(const Rows& rows, uint64_t addr, int64_t token, int64_t count) {
  const auto bytes = static_cast<std::size_t>(rows.digest->row_bytes);
  const auto hash = [&](uint64_t row, uint64_t key, int64_t at) {
    return row_hash(reinterpret_cast<const unsigned char*>(row), bytes, key, at);
  };
  uint64_t sum = 0;
  if (rows.head_step > rows.token_step) {
    for (std::size_t head = 0; head < rows.keys.size(); ++head, addr += rows.head_step) {
      for (int64_t i = 0; i < count; ++i) {
        sum += hash(addr + i * rows.token_step, rows.keys[head], token + i);
      }
    }
    return sum;
  }
  for (int64_t i = 0; i < count; ++i, addr += rows.token_step) {
    for (std::size_t head = 0; head < rows.keys.size(); ++head) {
      sum += hash(addr + head * rows.head_step, rows.keys[head], token + i);
    }
  }
  return sum;
}

/// Adds the hashes of the rows of a piece to the sums of their blocks.
void add_rows(
    const Rows& rows,
    const Piece& piece,
    int64_t page_size,
    const Blocks& blocks,
    std::atomic<uint64_t>* sums
) {
  for (int64_t i = 0; i < piece.count;) {
    const int64_t token = piece.token + i, slot = piece.slot + i;
    const int64_t of_page = std::min(page_size - slot % page_size, piece.count - i);
    const bool whole = rows.unit_tokens > 1;
    const int64_t count = whole ? of_page : blocks.left(token, of_page);
    const uint64_t addr = rows.first + slot / page_size * rows.digest->entry->stride() +
                          slot % page_size * rows.token_step;
    const uint64_t sum = sum_of(rows, addr, token, whole ? 1 : count);
    sums[blocks.of(token)].fetch_add(sum, std::memory_order_relaxed);
    i += count;
  }
}

bool has_entry(const KVLayout& layout, const KVEntry& like) {
  const KVEntry* found = layout.find(like);
  return found && !found->is_elided();
}

void check_peer(const KVLayout& layout, const KVLayout& peer, const KVEntry& entry) {
  require(
      peer.total_heads(entry.kind) == layout.total_heads(entry.kind),
      "peer must have the total_kv_heads of layout, got ", peer.total_heads(entry.kind), " and ",
      layout.total_heads(entry.kind)
  );
  require(
      entry.token_rows || peer.placement().page_size == layout.placement().page_size, entry,
      " is not rows of tokens, so peer must have pages of ", layout.placement().page_size, ", got ",
      peer.placement().page_size
  );
}

/// The pieces into which threads divide the tokens: whole pages, of about equal bytes.
std::vector<Piece> pieces_of(
    std::span<const HeldTokens> held, const std::vector<Rows>& all, int64_t page_size
) {
  uint64_t widest = 1;
  for (const Rows& rows : all) widest = std::max(widest, rows.digest->entry->item_len);
  const int64_t most = std::max<int64_t>(1, kItemBytes / static_cast<int64_t>(widest)) * page_size;
  std::vector<Piece> pieces;
  for (const HeldTokens& run : held) {
    for (int64_t i = 0; i < run.count; i += most) {
      pieces.push_back({run.token + i, run.slot + i, std::min(most, run.count - i)});
    }
  }
  return pieces;
}

}  // namespace

std::vector<KVEntryDigest> digest_kv(
    const KVLayout& layout,
    const KVTokenRange& range,
    std::optional<int64_t> block_tokens,
    const KVLayout* peer,
    int num_threads
) {
  if (const auto overlap = layout.overlap()) {
    require(
        false, "buffers must not overlap, got ", *overlap->first, " at ", overlap->first->addr,
        " and ", *overlap->second, " at ", overlap->second->addr
    );
  }
  const int64_t block = block_tokens.value_or(INT64_MAX);
  require(block >= 1, "block_tokens must be >= 1, got ", block);
  const IndexRange tokens = tokens_of(kFunction, layout, range);
  const std::vector<HeldTokens> held = held_tokens(kFunction, layout, range, peer);
  const int64_t page_size = layout.placement().page_size;
  const Blocks blocks = {.tokens = block, .first = tokens.begin / block};
  const int64_t num_blocks = tokens.size() == 0 ? 0 : blocks.of(tokens.end - 1) + 1;
  std::vector<KVEntryDigest> digests;
  for (const KVEntry& entry : layout.entries()) {
    const bool shared = !peer || (peer->answers_for(entry) && has_entry(*peer, entry));
    if (!entry.is_elided() && shared) digests.push_back({.entry = &entry});
  }
  const auto num_entries = static_cast<int64_t>(digests.size());
  require(
      num_entries == 0 || num_blocks <= kMaxSums / num_entries, "block_tokens must leave at most ",
      kMaxSums, " sums, got ", num_blocks, " blocks of ", num_entries, " buffers"
  );
  std::vector<Rows> all;
  for (KVEntryDigest& digest : digests) {
    const KVEntry& entry = *digest.entry;
    if (peer) check_peer(layout, *peer, entry);
    if (!entry.token_rows) check_whole_pages(entry, held, page_size, tokens.end);
    all.push_back(rows_of(layout, digest, peer));
    const int64_t unit = all.back().unit_tokens;
    for (const HeldTokens& run : held) {
      digest.num_rows += (run.count + unit - 1) / unit * std::ssize(all.back().keys);
    }
  }
  const std::vector<Piece> pieces = pieces_of(held, all, page_size);
  const auto sums = std::make_unique<std::atomic<uint64_t>[]>(num_entries * num_blocks);
  const auto num_pieces = static_cast<int64_t>(pieces.size());
  parallel_for(
      num_entries * num_pieces, num_threads > 0 ? num_threads : default_num_threads(),
      [&](int64_t item, StopToken&) {
        const int64_t i = item / num_pieces;
        add_rows(all[i], pieces[item % num_pieces], page_size, blocks, &sums[i * num_blocks]);
      }
  );
  for (int64_t i = 0; i < num_entries; ++i) {
    digests[i].sums.assign(&sums[i * num_blocks], &sums[i * num_blocks] + num_blocks);
  }
  return digests;
}

}  // namespace cpattn
