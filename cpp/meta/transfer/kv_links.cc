// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpattn/base/check.h"
#include "meta/transfer/kv_link.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "plan_kv_links";

/// Heads and tokens of an entry of the destination that one source writes.
struct Patch {
  std::size_t source;
  IndexRange heads;
  IndexRange tokens;

  bool contains(int64_t head, int64_t token) const {
    return heads.contains(head) && tokens.contains(token);
  }
};

/// The borders of `whole` and those of patches within it.
template <class GetRange>
std::vector<int64_t> cuts(IndexRange whole, const std::vector<Patch>& patches, GetRange range_of) {
  std::vector<int64_t> values = {whole.begin, whole.end};
  for (const Patch& patch : patches) {
    const IndexRange range = range_of(patch);
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

/// Checks that sources write every element of an entry exactly once. Between two neighbouring
/// cuts nothing changes: one element stands for all.
void check_covered_once(
    std::size_t destination,
    const KVEntry& entry,
    const std::vector<Patch>& patches,
    IndexRange all_heads,
    IndexRange all_tokens
) {
  const auto heads = cuts(all_heads, patches, [](const Patch& patch) { return patch.heads; });
  const auto tokens = cuts(all_tokens, patches, [](const Patch& patch) { return patch.tokens; });
  for (std::size_t h = 0; h + 1 < heads.size(); ++h) {
    for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
      std::vector<std::size_t> sources;
      for (const Patch& patch : patches) {
        if (patch.contains(heads[h], tokens[t])) sources.push_back(patch.source);
      }
      check(
          sources.size() == 1, kFunction, ": ", entry, " of destination ", destination, ", heads ",
          IndexRange{heads[h], heads[h + 1]}, ", tokens ", IndexRange{tokens[t], tokens[t + 1]},
          ", must be sent by one source, got ", names(sources)
      );
    }
  }
}

struct PlannedLink {
  std::size_t source;
  KVLinkSpec spec;
};

void check_destination(
    std::size_t index, const KVLayout& dst, const std::vector<PlannedLink>& links, bool with_draft
) {
  IndexRange tokens = {0, 1};  // for the message, if nothing comes
  for (const PlannedLink& link : links) tokens = link.spec.all_tokens;
  for (const KVEntry& entry : dst.entries()) {
    if (entry.is_draft && !with_draft) continue;
    std::vector<Patch> patches;
    for (const auto& [source, spec] : links) {
      for (const KVPair& pair : spec.pairs) {
        if (pair.dst == &entry) patches.push_back({source, pair.heads, spec.tokens});
      }
    }
    check_covered_once(index, entry, patches, dst.heads(entry.kind), tokens);
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

/// Returns what `make` returns; errors of `make` get the name of the link, too.
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
