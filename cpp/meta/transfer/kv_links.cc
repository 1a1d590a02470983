// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpattn/base/check.h"
#include "meta/transfer/kv_link.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_kv_links";

/// The part of a destination entry that one source writes: these heads of these tokens.
struct Patch {
  std::size_t source = 0;
  IndexRange heads;
  std::span<const IndexRange> tokens;  // ascending

  bool operator==(const Patch& other) const {
    return source == other.source && heads == other.heads && tokens.data() == other.tokens.data() &&
           tokens.size() == other.tokens.size();
  }
};

/// The borders of `whole` and those of ranges within it.
std::vector<int64_t> cuts(IndexRange whole, std::span<const IndexRange> ranges) {
  std::vector<int64_t> values = {whole.begin, whole.end};
  for (const IndexRange& range : ranges) {
    for (const int64_t cut : {range.begin, range.end}) {
      if (whole.contains(cut)) values.push_back(cut);
    }
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

std::string names(const std::vector<std::size_t>& sources) {
  if (sources.empty()) return "no source";
  std::string text = "sources ";
  for (std::size_t i = 0; i < sources.size(); ++i) {
    text += concat(i == 0 ? "" : " and ", sources[i]);
  }
  return text;
}

/// The part of an entry that all sources together must write.
struct Whole {
  std::size_t destination = 0;
  const KVEntry* entry = nullptr;
  IndexRange heads;
  IndexRange tokens;
};

/// Checks that every token of these heads, which all patches have, is in exactly one patch. Nothing
/// changes between two neighbouring cuts, so one token stands for all.
void check_tokens_once(const Whole& whole, IndexRange heads, std::vector<Patch> patches) {
  std::vector<IndexRange> ranges;
  for (const Patch& patch : patches) {
    ranges.insert(ranges.end(), patch.tokens.begin(), patch.tokens.end());
  }
  const std::vector<int64_t> tokens = cuts(whole.tokens, ranges);
  std::vector<std::size_t> sources;
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    sources.clear();
    for (Patch& patch : patches) {
      while (!patch.tokens.empty() && patch.tokens.front().end <= tokens[t]) {
        patch.tokens = patch.tokens.subspan(1);
      }
      if (!patch.tokens.empty() && patch.tokens.front().begin <= tokens[t]) {
        sources.push_back(patch.source);
      }
    }
    check(
        sources.size() == 1, kFunction, ": ", *whole.entry, " of destination ", whole.destination,
        ", heads ", heads, ", tokens ", IndexRange{tokens[t], tokens[t + 1]},
        ", must be sent by one source, got ", names(sources)
    );
  }
}

/// Checks that sources write every element of an entry exactly once.
void check_covered_once(const Whole& whole, const std::vector<Patch>& patches) {
  std::vector<IndexRange> ranges;
  ranges.reserve(patches.size());
  for (const Patch& patch : patches) ranges.push_back(patch.heads);
  const std::vector<int64_t> heads = cuts(whole.heads, ranges);
  for (std::size_t h = 0; h + 1 < heads.size(); ++h) {
    std::vector<Patch> having;
    for (const Patch& patch : patches) {
      if (patch.heads.contains(heads[h])) having.push_back(patch);
    }
    check_tokens_once(whole, {heads[h], heads[h + 1]}, std::move(having));
  }
}

struct PlannedLink {
  std::size_t source;
  KVLinkSpec spec;
};

void check_destination(
    std::size_t index, const KVLayout& dst, const std::vector<PlannedLink>& links, bool with_draft
) {
  Whole whole = {.destination = index, .tokens = {0, 1}};  // for the message, if no source sends
  for (const PlannedLink& link : links) whole.tokens = link.spec.all_tokens;
  std::vector<Patch> checked;  // of an earlier entry: layers of one kind have equal patches
  IndexRange checked_heads;
  for (const KVEntry& entry : dst.entries()) {
    if (entry.is_draft && !with_draft) continue;
    std::vector<Patch> patches;
    for (const auto& [source, spec] : links) {
      for (const KVPair& pair : spec.pairs) {
        if (pair.dst == &entry) patches.push_back({source, pair.heads, spec.sent});
      }
    }
    whole.entry = &entry;
    whole.heads = dst.heads(entry.kind);
    if (!patches.empty() && patches == checked && whole.heads == checked_heads) continue;
    check_covered_once(whole, patches);
    checked = std::move(patches);
    checked_heads = whole.heads;
  }
}

void check_sources(std::span<const KVPeer> sources, std::span<const KVPeer> destinations) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    for (const KVEntry& entry : sources[i].layout->entries()) {
      const bool received =
          std::any_of(destinations.begin(), destinations.end(), [&](const KVPeer& peer) {
            return peer.layout->answers_for(entry);
          });
      check(received, kFunction, ": ", entry, " of source ", i, " must have a destination");
    }
  }
}

/// Returns the result of `make`, and adds the name of the link to its errors.
template <class Make>
auto of_link(std::size_t source, std::size_t destination, Make make) {
  try {
    return make();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        concat(error.what(), ", from source ", source, " to destination ", destination)
    );
  }
}

/// Returns the links of a destination, after a check that together they are complete.
std::vector<PlannedLink> specify_links(
    std::span<const KVPeer> sources,
    const KVPeer& to,
    std::size_t destination,
    KVTransferRange range
) {
  std::vector<PlannedLink> links;
  links.reserve(sources.size());
  bool with_draft = false;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const KVPeer& from = sources[i];
    range.cp_rank = from.cp_rank;
    with_draft |= from.layout->has_draft();
    KVLinkSpec spec = of_link(i, destination, [&] {
      return specify_link(*from.layout, *to.layout, from.pages, to.pages, range);
    });
    links.push_back({i, std::move(spec)});
  }
  check_destination(destination, *to.layout, links, with_draft);
  return links;
}

}  // namespace

std::vector<KVLink> plan_kv_links(
    std::span<const KVPeer> sources,
    std::span<const KVPeer> destinations,
    const KVTransferRange& range
) {
  check_sources(sources, destinations);
  std::vector<KVLink> plans;
  for (std::size_t d = 0; d < destinations.size(); ++d) {
    const KVPeer& to = destinations[d];
    for (PlannedLink& link : specify_links(sources, to, d, range)) {
      TransferPlan plan = of_link(link.source, d, [&] {
        return plan_link(std::move(link.spec), *sources[link.source].layout, *to.layout);
      });
      if (plan.num_blocks() > 0) plans.push_back({link.source, d, std::move(plan)});
    }
  }
  std::sort(plans.begin(), plans.end(), [](const KVLink& a, const KVLink& b) {
    return std::pair(a.source, a.destination) < std::pair(b.source, b.destination);
  });
  return plans;
}

}  // namespace cpattn
