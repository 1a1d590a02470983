// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "cpattn/context_parallel/exchanges.h"
#include "meta/context_parallel/exchange_sums.h"

namespace cpattn {
namespace {

using Counts = std::vector<int64_t>;

/// New rows that go to the ranks that keep them.
Counts written(const ExchangedLayer& e) {
  Counts bytes = e.held.arriving;
  for (int64_t& count : bytes) count *= e.writes ? e.layer.row() : 0;
  return bytes;
}

Counts plus(Counts bytes, const Counts& more) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] += more[i];
  return bytes;
}

Counts received_of(const RoundTrip& moved) {
  return plus(moved.before.received, moved.after.received);
}

/// Query heads and KV heads of each rank.
struct HeadCounts {
  HeadCounts(const LayerBytes& layer, std::size_t num_ranks) {
    for (const HeadShare& share :
         share_heads(layer.num_heads, layer.num_kv_heads, static_cast<int64_t>(num_ranks))) {
      heads.push_back(share.q.size());
      kv_heads.push_back(share.kv.size());
    }
  }
  Counts heads, kv_heads;
};

Counts by_gather(const ExchangedLayer& e) {
  Counts rows = e.held.seen;
  for (std::size_t rank = 0; e.writes && rank < rows.size(); ++rank) {
    rows[rank] += e.held.tokens[rank] - e.held.new_keys[rank];
  }
  return send_rows(rows, e.layer.row(), false).received;
}

Counts by_ring(const ExchangedLayer& e) {
  return plus(send_rows(e.held.keys, e.layer.row(), true).received, written(e));
}

Counts by_pass_q(const ExchangedLayer& e) {
  const LayerBytes& layer = e.layer;
  const int64_t state = layer.num_heads * (layer.output + kLseBytes);
  return plus(
      received_of(send_queries(e.held.tokens, layer.num_heads * layer.query, state)), written(e)
  );
}

Counts by_all_to_all(const ExchangedLayer& e) {
  const auto [heads, kv_heads] = HeadCounts(e.layer, e.held.tokens.size());
  const RoundTrip moved =
      send_by_heads(e.held.tokens, e.held.seen, e.layer, heads, kv_heads, e.layer.output);
  return plus(received_of(moved), written(e));
}

/// Counts without the padding of pages on the ring.
Counts by_usp(const ExchangedLayer& e) {
  Counts bytes = written(e);
  const std::size_t columns = e.mesh[0].size();
  const auto [heads, kv_heads] = HeadCounts(e.layer, columns);
  Counts keys_of_rows;
  for (const Counts& row : e.mesh) {
    Counts tokens, keys;
    for (const int64_t rank : row) {
      tokens.push_back(e.held.tokens[rank]);
      keys.push_back(e.held.keys[rank]);
    }
    const int64_t result = e.layer.output + kLseBytes;
    const Counts within =
        received_of(send_by_heads(tokens, keys, e.layer, heads, kv_heads, result));
    for (std::size_t column = 0; column < columns; ++column) {
      bytes[row[column]] += within[column];
    }
    keys_of_rows.push_back(sum_of(keys));
  }
  for (std::size_t column = 0; column < columns; ++column) {
    const int64_t row_bytes = kv_heads[column] * e.layer.key;
    const Counts passed_on = send_rows(keys_of_rows, row_bytes, true).received;
    for (std::size_t place = 0; place < e.mesh.size(); ++place) {
      bytes[e.mesh[place][column]] += passed_on[place];
    }
  }
  return bytes;
}

int64_t merged_by_pass_q(const ExchangedLayer& e) {
  return std::ssize(e.held.tokens) * most_of(e.held.tokens) * e.layer.num_heads;
}

int64_t merged_by_usp(const ExchangedLayer& e) {
  int64_t most_tokens = 0;
  for (const Counts& row : e.mesh) {
    int64_t tokens = 0;
    for (const int64_t rank : row) tokens += e.held.tokens[rank];
    most_tokens = std::max(most_tokens, tokens);
  }
  return std::ssize(e.mesh) * most_tokens * most_of(HeadCounts(e.layer, e.mesh[0].size()).heads);
}

const Exchange kExchanges[] = {
    {.name = "gather", .received = by_gather, .preference = 0},
    {.name = "ring", .received = by_ring, .rounds_twice = true},
    {.name = "pass_q",
     .received = by_pass_q,
     .preference = 3,
     .merged = merged_by_pass_q,
     .needs_shards = true,
     .reads_in_place = true,
     .rounds_twice = true},
    {.name = "all_to_all",
     .received = by_all_to_all,
     .preference = 1,
     .needs_even_heads = true,
     .sends_wanted_lse = true},
    {.name = "usp",
     .received = by_usp,
     .preference = 2,
     .merged = merged_by_usp,
     .needs_mesh = true,
     .needs_even_heads = true,
     .writes = false,
     .rounds_twice = true},
};

}  // namespace

std::span<const Exchange> exchanges() { return kExchanges; }

Traffic send_rows(std::span<const int64_t> rows, int64_t row_bytes, bool by_ring) {
  const int64_t all = sum_of(rows), size = std::ssize(rows);
  check_bytes("send_rows", {as_real(all), as_real(size), as_real(row_bytes)});
  Traffic moved;
  for (int64_t rank = 0; rank < size; ++rank) {
    // A rank of a ring passes on all rows except those of the next rank.
    moved.sent.push_back(
        row_bytes * (by_ring ? all - rows[(rank + 1) % size] : (size - 1) * rows[rank])
    );
    moved.received.push_back(row_bytes * (all - rows[rank]));
  }
  return moved;
}

RoundTrip send_queries(std::span<const int64_t> tokens, int64_t query_bytes, int64_t state_bytes) {
  const Traffic asked = send_rows(tokens, query_bytes, false);
  Traffic answered = send_rows(tokens, state_bytes, false);
  std::swap(answered.sent, answered.received);
  return {.before = asked, .after = answered};
}

RoundTrip send_by_heads(
    std::span<const int64_t> tokens,
    std::span<const int64_t> keys,
    const LayerBytes& layer,
    std::span<const int64_t> heads,
    std::span<const int64_t> kv_heads,
    int64_t result_bytes
) {
  const int64_t all_tokens = sum_of(tokens), all_keys = sum_of(keys), readers = sum_of(kv_heads);
  check_bytes(
      "send_by_heads", {as_real(all_tokens + all_keys), as_real(layer.num_heads + readers),
                        as_real(layer.query) + as_real(layer.key) + as_real(result_bytes)}
  );
  RoundTrip moved;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    const int64_t other_tokens = all_tokens - tokens[rank], other_keys = all_keys - keys[rank];
    const int64_t other_heads = layer.num_heads - heads[rank];
    moved.before.sent.push_back(
        tokens[rank] * other_heads * layer.query +
        keys[rank] * (readers - kv_heads[rank]) * layer.key
    );
    moved.before.received.push_back(
        other_tokens * heads[rank] * layer.query + other_keys * kv_heads[rank] * layer.key
    );
    moved.after.sent.push_back(other_tokens * heads[rank] * result_bytes);
    moved.after.received.push_back(tokens[rank] * other_heads * result_bytes);
  }
  return moved;
}

}  // namespace cpattn
