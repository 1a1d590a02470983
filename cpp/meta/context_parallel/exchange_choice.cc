// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "cpattn/base/check.h"
#include "cpattn/context_parallel/exchanges.h"
#include "meta/context_parallel/exchange_sums.h"

namespace cpattn {
namespace {

// A wire of 1 GB/s moves about this while a thread merges an element of a partial result (2.7 ns).
constexpr int64_t kMergeBytes = 3;
// A wire of 1 to 3 GB/s moves this while ranks wait for another round.
constexpr int64_t kRoundBytes = 256 << 10;

using Bytes = std::vector<std::pair<std::string, int64_t>>;

void check_ranks(const ExchangedLayer& e) {
  constexpr CheckFor kCheck{"choose_exchange"};
  const int64_t size = std::ssize(e.held.tokens);
  kCheck(size > 0, "held must be of one rank at least");
  for (const auto* counts : {&e.held.keys, &e.held.seen, &e.held.new_keys, &e.held.arriving}) {
    kCheck(std::ssize(*counts) == size, "held must be of ", size, " ranks, got ", counts->size());
  }
  int64_t placed = 0;
  for (const auto& row : e.mesh) {
    kCheck(row.size() == e.mesh[0].size(), "mesh must have rows of equal lengths");
    for (const int64_t rank : row) {
      kCheck(rank >= 0 && rank < size, "mesh must have ranks below ", size, ", got ", rank);
      ++placed;
    }
  }
  kCheck(e.mesh.empty() || placed == size, "mesh must have ", size, " ranks, got ", placed);
}

/// Whether `size` ranks have equally many heads and KV heads.
bool is_even(const LayerBytes& layer, int64_t size) {
  return layer.num_heads % size == 0 &&
         (layer.num_kv_heads % size == 0 || size % layer.num_kv_heads == 0);
}

bool is_choice(const Exchange& exchange, const ExchangedLayer& e) {
  if (exchange.preference < 0 || (exchange.needs_mesh && e.mesh.empty())) return false;
  const auto among = exchange.needs_mesh ? e.mesh[0].size() : e.held.tokens.size();
  return !exchange.needs_even_heads || is_even(e.layer, static_cast<int64_t>(among));
}

int64_t of_name(const Bytes& bytes, const std::string& name) {
  const auto found = std::ranges::find(bytes, name, &Bytes::value_type::first);
  return found == bytes.end() ? 0 : found->second;
}

/// The name with the fewest bytes, the first of equals.
std::string cheapest(const Bytes& cost) {
  return std::ranges::min_element(cost, {}, &Bytes::value_type::second)->first;
}

std::string listed(const Bytes& bytes) {
  std::string text;
  for (const auto& [name, count] : bytes) {
    text += concat(text.empty() ? "" : ", ", name, ' ', count);
  }
  return text;
}

/// States the bytes received by a choice, and by the others of `names`.
std::string reason_of(const std::string& name, Bytes received) {
  const int64_t least = of_name(received, name);
  std::erase_if(received, [&](const auto& each) { return each.first == name; });
  return concat("a rank receives at most ", least, " bytes, by ", listed(received));
}

}  // namespace

ExchangeChoice choose_exchange(const ExchangedLayer& e, int64_t max_scratch_bytes) {
  check_ranks(e);
  const LayerBytes& layer = e.layer;
  check_bytes(
      "choose_exchange",
      {as_real(sum_of(e.held.tokens) + sum_of(e.held.keys)), as_real(e.held.tokens.size()),
       as_real(layer.num_heads + layer.num_kv_heads),
       as_real(layer.query) + as_real(layer.key) + as_real(layer.output + kLseBytes) +
           as_real(layer.merged) * kMergeBytes}
  );
  ExchangeChoice choice;
  std::vector<const Exchange*> named;
  for (const Exchange& exchange : exchanges()) {
    if (exchange.needs_mesh && e.mesh.empty()) continue;
    choice.received.emplace_back(exchange.name, most_of(exchange.received(e)));
    if (is_choice(exchange, e)) named.push_back(&exchange);
  }
  std::ranges::sort(named, {}, &Exchange::preference);
  Bytes received, merging, cost;
  for (const Exchange* exchange : named) {
    received.emplace_back(exchange->name, of_name(choice.received, exchange->name));
    cost.push_back(received.back());
    if (exchange->merged == nullptr) continue;
    merging.emplace_back(exchange->name, kMergeBytes * e.layer.merged * exchange->merged(e));
    cost.back().second += merging.back().second;
  }
  choice.exchange = cheapest(cost);
  choice.reason =
      reason_of(choice.exchange, received) + "; merging counts as bytes, too: " + listed(merging);
  if (std::ranges::find(received, "all_to_all", &Bytes::value_type::first) == received.end()) {
    choice.reason += concat(
        "; ", e.layer.num_heads, " and ", e.layer.num_kv_heads, " heads are uneven on ",
        e.held.tokens.size(), " ranks"
    );
  }
  // Copies that arrive for the next round, that have arrived, and in their places.
  const int64_t copies = e.layer.num_kv_heads == 1 ? 2 : 3;
  const int64_t scratch = copies * sum_of(e.held.keys) * e.layer.key;
  if (choice.exchange == "gather" && scratch > max_scratch_bytes) {
    choice.exchange = "ring";
    choice.reason += concat("; a KV head takes ", scratch, " bytes, more than max_scratch_bytes");
  }
  return choice;
}

ExchangeChoice choose_state_exchange(
    int64_t num_tokens, int64_t num_heads, int64_t output_bytes, int64_t num_ranks, bool all_heads
) {
  check_bytes(
      "choose_state_exchange", {as_real(num_tokens), as_real(output_bytes) + kLseBytes,
                                as_real(num_heads), 2 * as_real(num_ranks)}
  );
  const int64_t state = num_tokens * (output_bytes + kLseBytes);  // of one head
  int64_t most = 0;
  for (const HeadShare& share : share_heads(num_heads, num_heads, num_ranks)) {
    const int64_t own = share.q.size(), others = all_heads ? num_heads - own : 0;
    most = std::max(most, (num_ranks - 1) * own + others);
  }
  ExchangeChoice choice;
  choice.received = {{"gather", (num_ranks - 1) * num_heads * state}, {"all_to_all", most * state}};
  Bytes cost = choice.received;
  if (all_heads) cost[1].second += kRoundBytes;
  choice.exchange = cheapest(cost);
  choice.reason = reason_of(choice.exchange, choice.received);
  if (all_heads) {
    choice.reason +=
        concat("; all_to_all takes a second round, which is worth ", kRoundBytes, " bytes");
  }
  return choice;
}

ExchangeChoice choose_sparse_exchange(
    std::span<const int64_t> keys,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> visible,
    const SparseBytes& sizes,
    int64_t max_scratch_bytes
) {
  constexpr CheckFor kCheck{"choose_sparse_exchange"};
  const int64_t peers = std::ssize(keys) - 1, all_keys = sum_of(keys),
                all_rows = sum_of(rows_per_rank);
  kCheck(peers >= 0 && keys.size() == rows_per_rank.size(), "keys and rows must be of equal ranks");
  kCheck(all_rows == std::ssize(visible), "visible must be of ", all_rows, " rows");
  check_bytes(
      "choose_sparse_exchange",
      {as_real(all_keys + all_rows), as_real(keys.size()), as_real(sizes.topk),
       12 + as_real(sizes.query) + as_real(sizes.result) + as_real(sizes.asking) +
           as_real(sizes.latent) + as_real(sizes.index_key)}
  );
  std::vector<int64_t> searching;  // rows of each rank that see more keys than they select
  const int64_t* row = visible.data();
  for (const int64_t count : rows_per_rank) {
    searching.push_back(std::count_if(row, row + count, [&](int64_t n) { return n > sizes.topk; }));
    row += count;
  }
  const int64_t all_searching = sum_of(searching), topk = sizes.topk;
  int64_t gather = 0, pass_q = 0;
  for (int64_t rank = 0; rank <= peers; ++rank) {
    const int64_t others = all_keys - keys[rank], rows = rows_per_rank[rank];
    const int64_t index_keys = all_searching > 0 ? others * sizes.index_key : 0;
    gather = std::max(
        gather,
        std::min(others, rows * topk) * sizes.latent + peers * ((all_keys + 7) / 8) + index_keys
    );
    pass_q = std::max(
        pass_q, (all_searching - searching[rank]) * sizes.asking +
                    peers * searching[rank] * 8 * topk +
                    (all_rows - rows) * (4 * topk + sizes.query) + peers * rows * sizes.result
    );
  }
  ExchangeChoice choice;
  choice.received = {{"gather", gather}, {"pass_q", pass_q}};
  choice.exchange = cheapest(choice.received);
  choice.reason = reason_of(choice.exchange, choice.received);
  const int64_t scratch = 2 * all_keys * sizes.index_key;
  if (choice.exchange == "gather" && scratch > max_scratch_bytes) {
    choice.exchange = "pass_q";
    choice.reason += concat("; index keys take ", scratch, " bytes, more than max_scratch_bytes");
  }
  return choice;
}

}  // namespace cpattn
