// SPDX-License-Identifier: Apache-2.0
// Layouts and the links between fleets of prefill and decode servers. Where no number is broken on
// purpose the plans are carried out, and every byte of every destination is looked at.
#include "cpattn/transfer/kv_transfer.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <tuple>
#include <vector>

#include "cpattn/transfer/copy_blocks.h"
#include "fuzz/fuzz.h"
#include "fuzz/intervals.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Bytes = std::vector<uint8_t>;

constexpr uint8_t kCanary = 0xee;
constexpr KVKind kKinds[] = {KVKind::k,     KVKind::v,       KVKind::index_k,
                             KVKind::state, KVKind::k_scale, KVKind::v_scale};
constexpr int kNumKinds = std::size(kKinds);

struct Model {
  Ints layers;  // that have KV
  std::vector<KVKind> kinds;
  int64_t head_bytes[kNumKinds] = {};
  bool token_rows[kNumKinds] = {};
  int64_t num_heads = 1;
  int64_t num_tokens = 0;
  int64_t num_draft = 0;

  int64_t heads(KVKind kind) const {
    return kind == KVKind::index_k || kind == KVKind::state ? 1 : num_heads;
  }
};

struct Side {
  int64_t page_size = 1;
  Ints cuts;  // first layers of stages, and the end of the last
  int64_t tp_size = 1, cp_size = 1, dcp_size = 1, dcp_interleave = 1, shard_size = 1;
  bool with_draft = false;
  int64_t start = 0;
  int64_t gap = 0;  // bytes between pages
  KVAxisOrder kv_layout = KVAxisOrder::nhd;
};

/// A byte that says where it belongs.
uint8_t content(const KVEntry& entry, int64_t token, int64_t head, int64_t byte) {
  const int64_t kind = static_cast<int64_t>(entry.kind) + (entry.is_draft ? kNumKinds : 0);
  const int64_t value =
      ((entry.layer_id * 2 * kNumKinds + kind) * 61 + token) * 5 + head * 11 + byte;
  return static_cast<uint8_t>(value * 37 % 233);  // never the canary
}

/// A process with its memory, a buffer of just the right size for each entry.
struct Server {
  const Model* model = nullptr;
  const Side* side = nullptr;
  int64_t tp_rank = 0, cp_rank = 0, dcp_rank = 0, shard_rank = 0;
  Ints tokens;  // that it holds, from side->start on
  Ints slots;   // of these
  Ints pages;
  std::vector<KVEntry> entries;
  std::vector<Bytes> memory;
  KVPlacement placement;

  int64_t num_heads(KVKind kind) const {
    return std::max<int64_t>(1, model->heads(kind) / side->tp_size);
  }
  int64_t first_head(KVKind kind) const {
    return tp_rank * model->heads(kind) / std::max(side->tp_size, model->heads(kind)) *
           num_heads(kind);
  }
  int64_t head_bytes(KVKind kind) const { return model->head_bytes[static_cast<int>(kind)]; }
  int64_t row_bytes(KVKind kind) const { return num_heads(kind) * head_bytes(kind); }
  /// Returns the place where a head of a slot begins.
  int64_t place(const KVEntry& entry, int64_t slot, int64_t head) const {
    const int64_t page_size = side->page_size, width = head_bytes(entry.kind);
    const int64_t page = slot / page_size * static_cast<int64_t>(entry.stride());
    const int64_t row = slot % page_size;
    if (entry.kv_layout == KVAxisOrder::hnd) return page + (head * page_size + row) * width;
    return page + (row * num_heads(entry.kind) + head) * width;
  }
};

void add_entry(Server& server, bool is_draft, int64_t layer, KVKind kind, int64_t num_pages) {
  const int64_t item_len = server.row_bytes(kind) * server.side->page_size;
  const bool token_rows = server.model->token_rows[static_cast<int>(kind)];
  const int64_t stride = item_len + server.side->gap;
  Bytes& bytes = server.memory.emplace_back(stride * (num_pages - 1) + item_len, kCanary);
  server.entries.push_back(
      {.layer_id = layer,
       .kind = kind,
       .is_draft = is_draft,
       .addr = reinterpret_cast<uint64_t>(bytes.data()),
       .num_bytes = bytes.size(),
       .item_len = static_cast<uint64_t>(item_len),
       .token_rows = token_rows,
       .dtype = {},
       .page_stride = stride,
       .kv_layout = token_rows ? server.side->kv_layout : KVAxisOrder::nhd}
  );
}

Ints make_pages(const Side& side, int64_t num_rows, Reader& in) {
  const int64_t used = (num_rows + side.page_size - 1) / side.page_size;
  Ints ids((used + 2) * side.shard_size);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  if (in.flag()) {
    for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[in.between(0, i - 1)]);
  }
  ids.resize(used);
  return ids;
}

/// Gives the server its tokens, and pages that those of a group that stripes them have together.
void place_tokens(Server& server, const Server* of_group, Reader& in) {
  const Side& side = *server.side;
  Ints listed;
  for (int64_t t = side.start; t < server.model->num_tokens; ++t) {
    if (t / side.dcp_interleave % side.dcp_size == server.dcp_rank) listed.push_back(t);
  }
  server.pages = of_group ? of_group->pages : make_pages(side, std::ssize(listed), in);
  for (std::size_t i = 0; i < listed.size(); ++i) {
    const auto row = static_cast<int64_t>(i);
    const int64_t page = server.pages[row / side.page_size];
    if (page % side.shard_size != server.shard_rank) continue;
    server.tokens.push_back(listed[i]);
    server.slots.push_back(page / side.shard_size * side.page_size + row % side.page_size);
  }
}

std::vector<Server> make_fleet(const Model& model, const Side& side, Reader& in) {
  std::vector<Server> fleet;
  const std::size_t stages = side.cuts.size() - 1;
  for (std::size_t stage = 0; stage < stages; ++stage) {
    const int64_t ranks = side.tp_size * side.cp_size * side.dcp_size * side.shard_size;
    fleet.reserve(stages * ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      Server& server = fleet.emplace_back();
      server.model = &model;
      server.side = &side;
      server.shard_rank = rank % side.shard_size;
      server.tp_rank = rank / side.shard_size % side.tp_size;
      server.cp_rank = rank / side.shard_size / side.tp_size % side.cp_size;
      server.dcp_rank = rank / side.shard_size / side.tp_size / side.cp_size;
      place_tokens(server, server.shard_rank > 0 ? &fleet[fleet.size() - 2] : nullptr, in);
      const IndexRange layers = {side.cuts[stage], side.cuts[stage + 1]};
      const auto num_pages = std::ssize(server.pages) + 2;
      for (const KVKind kind : model.kinds) {
        for (const int64_t layer : model.layers) {
          if (layers.contains(layer)) add_entry(server, false, layer, kind, num_pages);
        }
        for (int64_t i = 0; side.with_draft && stage + 1 == stages && i < model.num_draft; ++i) {
          add_entry(server, true, i, kind, num_pages);
        }
      }
      server.placement = {
          .page_size = side.page_size,
          .tp_rank = server.tp_rank,
          .tp_size = side.tp_size,
          .total_kv_heads = model.num_heads,
          .layers = stages > 1 ? std::optional(layers) : std::nullopt,
          .dcp_rank = server.dcp_rank,
          .dcp_size = side.dcp_size,
          .dcp_interleave = side.dcp_interleave,
          .shard_rank = server.shard_rank,
          .shard_size = side.shard_size,
      };
    }
  }
  return fleet;
}

Model read_model(Reader& in) {
  Model model;
  const int64_t mask = in.between(1, 7);
  for (int64_t layer = 0; layer < 3; ++layer) {
    if (mask >> layer & 1) model.layers.push_back(layer);
  }
  const int64_t kinds = in.between(1, (1 << kNumKinds) - 1);
  const int64_t whole = in.bits(1) & 12;  // indexer and state may be pages without rows
  for (int i = 0; i < kNumKinds; ++i) {
    if (kinds >> i & 1) model.kinds.push_back(kKinds[i]);
    model.head_bytes[i] = in.between(1, 3);
    model.token_rows[i] = (whole >> i & 1) == 0;
  }
  model.num_heads = in.one_of({1, 2, 4});
  model.num_tokens = in.between(0, 24);
  model.num_draft = in.between(0, 1);
  return model;
}

Side read_side(Reader& in, bool is_source) {
  Side side;
  side.page_size = in.between(1, 5);
  side.cuts = {0};
  if (in.flag()) side.cuts.push_back(in.between(1, 2));
  side.cuts.push_back(3);
  side.tp_size = in.one_of({1, 1, 2, 4});
  if (is_source) {
    side.cp_size = in.between(1, 2);
  } else if (in.rarely(3)) {
    side.dcp_size = in.between(1, 3);
    side.dcp_interleave = in.one_of({int64_t{1}, int64_t{2}, side.page_size});
  }
  if (side.dcp_size == 1 && in.rarely(3)) side.shard_size = in.between(2, 3);
  side.with_draft = in.flag();
  if (in.rarely(3)) side.kv_layout = KVAxisOrder::hnd;
  if (in.rarely(3)) side.gap = in.between(1, 3);
  const int64_t cycle = side.dcp_size * side.dcp_interleave * side.page_size;
  side.start = in.rarely(4) ? cycle * in.between(0, 2) : 0;
  return side;
}

/// Writes what an entry has of the i-th token of a server.
void write_token(const Server& server, const KVEntry& entry, std::size_t i, Bytes& memory) {
  for (int64_t head = 0; head < server.num_heads(entry.kind); ++head) {
    const int64_t begin = server.place(entry, server.slots[i], head);
    for (int64_t b = 0; b < server.head_bytes(entry.kind); ++b) {
      memory[begin + b] = content(entry, server.tokens[i], server.first_head(entry.kind) + head, b);
    }
  }
}

void fill(Server& server) {
  for (std::size_t e = 0; e < server.entries.size(); ++e) {
    const KVEntry& entry = server.entries[e];
    for (std::size_t i = 0; i < server.tokens.size(); ++i) {
      write_token(server, entry, i, server.memory[e]);
    }
  }
}

/// That tokens arrived where they belong and nothing else changed, but rows behind the last token
/// in its page, which may come along.
void check_received(const Server& server, IndexRange sent, bool drafts_sent) {
  const int64_t page_size = server.side->page_size;
  for (std::size_t e = 0; e < server.entries.size(); ++e) {
    const KVEntry& entry = server.entries[e];
    Bytes expected(server.memory[e].size(), kCanary);
    int64_t last_page = -1;
    for (std::size_t i = 0; i < server.tokens.size(); ++i) {
      if (!sent.contains(server.tokens[i]) || (entry.is_draft && !drafts_sent)) continue;
      last_page = server.slots[i] / page_size;
      write_token(server, entry, i, expected);
    }
    if (last_page >= 0) {
      const int64_t begin = last_page * static_cast<int64_t>(entry.stride());
      const int64_t end = begin + static_cast<int64_t>(entry.item_len);
      for (int64_t b = begin; b < end; ++b) {
        if (expected[b] == kCanary) expected[b] = server.memory[e][b];
      }
    }
    FUZZ_CHECK(expected == server.memory[e]);
  }
}

/// Breaks some of the numbers that a peer sends.
void corrupt(Server& server, Reader& in) {
  const auto mostly = [&in](auto& value) {
    value = static_cast<std::remove_reference_t<decltype(value)>>(
        in.mostly(static_cast<int64_t>(value), 8)
    );
  };
  KVPlacement& placement = server.placement;
  const int64_t what = in.between(0, 6);
  if (what == 0 && !server.entries.empty()) {
    KVEntry& entry = server.entries[in.between(0, std::ssize(server.entries) - 1)];
    mostly(entry.layer_id);
    mostly(entry.addr);
    mostly(entry.num_bytes);
    mostly(entry.item_len);
    entry.kind = kKinds[in.between(0, kNumKinds - 1)];
    if (in.rarely(4)) entry.dtype = "int8";
    entry.is_draft ^= in.rarely(4);
    entry.token_rows ^= in.rarely(4);
    if (in.rarely(4)) entry.kv_layout = KVAxisOrder::hnd;
    if (in.rarely(4)) entry.page_stride = in.mostly(static_cast<int64_t>(entry.stride()), 2);
  } else if (what == 1) {
    mostly(placement.tp_rank);
    mostly(placement.tp_size);
    if (in.flag()) placement.total_kv_heads = in.mostly(placement.total_kv_heads.value_or(1), 2);
  } else if (what == 2) {
    placement.layers = IndexRange{in.mostly(0, 4), in.mostly(3, 4)};
    if (in.rarely(4)) placement.total_kv_heads.reset();
  } else if (what == 3) {
    mostly(placement.dcp_rank);
    mostly(placement.dcp_size);
    mostly(placement.dcp_interleave);
  } else if (what == 4 && !server.pages.empty()) {
    mostly(server.pages[in.between(0, std::ssize(server.pages) - 1)]);
    server.pages.resize(in.size_near(std::ssize(server.pages)));
  } else if (what == 5) {
    mostly(placement.shard_rank);
    mostly(placement.shard_size);
  } else {
    mostly(placement.page_size);
  }
}

/// Whether a plan of it could take a second and a gigabyte: a run or a block for each of
/// millions of tokens.
bool is_heavy(const Server& server) {
  const KVPlacement& placement = server.placement;
  return placement.page_size > 4096 && placement.page_size <= INT32_MAX;
}

void check_blocks(
    const std::vector<KVLink>& links,
    const std::vector<Server>& sources,
    const std::vector<Server>& destinations
) {
  for (std::size_t d = 0; d < destinations.size(); ++d) {
    Intervals written;
    for (const KVLink& link : links) {
      if (link.destination != d) continue;
      const TransferPlan& plan = link.plan;
      for (std::size_t i = 0; i < plan.num_blocks(); ++i) {
        const uint64_t length = plan.lengths()[i];
        FUZZ_CHECK(length > 0);
        const auto within = [length](uint64_t addr, const KVEntry& entry) {
          return addr >= entry.addr && entry.num_bytes >= length &&
                 addr - entry.addr <= entry.num_bytes - length;
        };
        const auto& from = sources.at(link.source).entries;
        const auto& to = destinations[d].entries;
        FUZZ_CHECK(std::ranges::any_of(from, [&](const KVEntry& entry) {
          return within(plan.src_addrs()[i], entry);
        }));
        FUZZ_CHECK(std::ranges::any_of(to, [&](const KVEntry& entry) {
          return within(plan.dst_addrs()[i], entry);
        }));
        written.add(plan.dst_addrs()[i], length);
      }
    }
    FUZZ_CHECK(written.are_disjoint());
  }
}

struct Peers {
  std::vector<std::unique_ptr<KVLayout>> layouts;
  std::vector<KVPeer> peers;
};

std::optional<Peers> make_peers(const std::vector<Server>& fleet) {
  Peers result;
  for (const Server& server : fleet) {
    auto layout =
        accepted([&] { return std::make_unique<KVLayout>(server.entries, server.placement); });
    if (!layout) return std::nullopt;
    for (const KVEntry& entry : (*layout)->entries()) {
      FUZZ_CHECK((*layout)->find(entry) != nullptr && *(*layout)->find(entry) == entry);
      FUZZ_CHECK((*layout)->heads(entry.kind).end <= (*layout)->total_heads(entry.kind));
    }
    result.peers.push_back(
        {.layout = layout->get(), .pages = server.pages, .cp_rank = server.cp_rank}
    );
    result.layouts.push_back(std::move(*layout));
  }
  return result;
}

void check_single(
    const Peers& from, const Peers& to, const std::vector<KVLink>& links, KVTransferRange range
) {
  for (const KVLink& link : links) {
    range.cp_rank = from.peers[link.source].cp_rank;
    const TransferPlan plan = plan_kv_transfer(
        *from.peers[link.source].layout, *to.peers[link.destination].layout,
        from.peers[link.source].pages, to.peers[link.destination].pages, range
    );
    FUZZ_CHECK(plan == link.plan);
  }
}

}  // namespace

void run(Reader in) {
  const bool is_broken = in.flag();
  const Model model = read_model(in);
  const Side src_side = read_side(in, true), dst_side = read_side(in, false);
  std::vector<Server> sources = make_fleet(model, src_side, in);
  std::vector<Server> destinations = make_fleet(model, dst_side, in);
  const int64_t least = std::min(std::max(src_side.start, dst_side.start), model.num_tokens);
  KVTransferRange range = {
      .src_start = src_side.start,
      .dst_start = dst_side.start,
      .cp_size = src_side.cp_size,
      .cp_share = in.flag() ? CpShare::layers : CpShare::pages,
  };
  const int64_t first = in.flag() ? least : in.between(least, model.num_tokens);
  const int64_t count =
      in.flag() ? model.num_tokens - first : in.between(0, model.num_tokens - first);
  range.first_token = first;
  range.num_tokens = count;
  if (is_broken) {
    if (in.flag()) corrupt(sources[in.between(0, std::ssize(sources) - 1)], in);
    if (in.flag()) corrupt(destinations[in.between(0, std::ssize(destinations) - 1)], in);
    range.src_start = in.mostly(range.src_start);
    range.dst_start = in.mostly(range.dst_start);
    range.first_token = in.mostly(first);
    range.num_tokens = in.mostly(count);
    range.cp_size = in.mostly(range.cp_size);
    if (in.rarely(8)) range.first_token.reset();
    if (in.rarely(8)) range.num_tokens.reset();
    if (std::ranges::any_of(sources, is_heavy) || std::ranges::any_of(destinations, is_heavy)) {
      return;
    }
  }
  const std::optional<Peers> from = make_peers(sources), to = make_peers(destinations);
  if (!from || !to) return;
  const auto links = accepted([&] { return plan_kv_links(from->peers, to->peers, range); });
  if (!links) return;
  check_blocks(*links, sources, destinations);
  check_single(*from, *to, *links, range);
  if (is_broken) return;
  for (Server& source : sources) fill(source);
  for (const KVLink& link : *links) {
    copy_blocks(link.plan.src_addrs(), link.plan.dst_addrs(), link.plan.lengths(), 1);
  }
  const bool drafts = src_side.with_draft && dst_side.with_draft;
  for (const Server& server : destinations) {
    check_received(server, {first, first + count}, drafts);
  }
}

}  // namespace cpattn::fuzz
