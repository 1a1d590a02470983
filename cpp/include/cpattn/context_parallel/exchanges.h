// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/context_parallel/head_shares.h"

namespace cpattn {

/// Bytes of the float32 LSE of a token and head.
inline constexpr int64_t kLseBytes = 4;

/// Head counts of a layer, and bytes of a token in one head.
struct LayerBytes {
  int64_t num_heads = 1, num_kv_heads = 1;
  int64_t query = 0, key = 0;  // a key with its value
  int64_t output = 0;
  int64_t merged = 0;  // elements of an output

  /// Bytes of the keys and values of a token.
  int64_t row() const { return num_kv_heads * key; }
};

/// Bytes that each rank sends and receives.
struct Traffic {
  std::vector<int64_t> sent, received;  // [ranks]
};
/// Traffic before attention, and after it.
struct RoundTrip {
  Traffic before, after;
};

/// Counts rows that go from each rank to all others, at once or, in a ring, from each to the next.
Traffic send_rows(std::span<const int64_t> rows, int64_t row_bytes, bool by_ring);
/// Counts queries that go from each rank to all others, and the states that come back for each
/// token.
RoundTrip send_queries(std::span<const int64_t> tokens, int64_t query_bytes, int64_t state_bytes);
/// Counts queries and keys that go to the ranks of their heads, and the results of these heads that
/// come back. A KV head counts once for each rank that has it. `heads` and `kv_heads` are the
/// numbers of each rank.
RoundTrip send_by_heads(
    std::span<const int64_t> tokens,
    std::span<const int64_t> keys,
    const LayerBytes& layer,
    std::span<const int64_t> heads,
    std::span<const int64_t> kv_heads,
    int64_t result_bytes
);

/// Numbers of rows of a batch on each rank [ranks].
struct HeldRows {
  std::vector<int64_t> tokens;    // tokens that it computes
  std::vector<int64_t> keys;      // keys that it keeps, cached and new: these go round a ring
  std::vector<int64_t> seen;      // the part of `keys` from the first visible key on
  std::vector<int64_t> new_keys;  // the new ones of `keys`
  std::vector<int64_t> arriving;  // the part of `new_keys` that other ranks compute
};

/// Ranks in rows, a row for each place on a ring; the ranks of a row share out heads.
using RankMesh = std::vector<std::vector<int64_t>>;

/// A layer of a batch whose rows ranks exchange. With `writes`, new rows also go to the ranks that
/// keep them. The mesh is empty if ranks form none.
struct ExchangedLayer {
  HeldRows held;
  LayerBytes layer;
  bool writes = false;
  RankMesh mesh;
};

/// One way to bring the queries and the keys of all ranks together.
struct Exchange {
  const char* name = "";
  /// Counts the bytes that each rank receives.
  std::vector<int64_t> (*received)(const ExchangedLayer&) = nullptr;
  /// Place among equals for "auto", the lowest first; -1 if "auto" has another reason.
  int preference = -1;
  /// Counts the outputs of a head on the rank that merges most; null if no rank merges.
  int64_t (*merged)(const ExchangedLayer&) = nullptr;
  bool needs_mesh = false;
  bool needs_even_heads = false;  ///< For "auto": all ranks have equally many heads and KV heads.
  bool needs_shards = false;      ///< It has no meaning if every rank has all keys.
  /// Whether it reads each shard in place, so that scales of tokens fit and each rank may have its
  /// own scales; other exchanges read copies of all ranks' keys.
  bool reads_in_place = false;
  /// Whether it writes new keys itself, some heads during the attention of others.
  bool writes = true;
  bool rounds_twice = false;  ///< Results are merged from rounded partial results.
  /// Whether it sends the LSE only on request, so that all ranks must request it, or none.
  bool sends_wanted_lse = false;
};
/// All exchanges, in the order in which they are listed.
std::span<const Exchange> exchanges();

/// An exchange, the sizes that decided, and for each exchange the bytes of the rank that receives
/// most.
struct ExchangeChoice {
  std::string exchange, reason;
  std::vector<std::pair<std::string, int64_t>> received;
};

/// Chooses for a layer of a prefill: the fewest bytes among the exchanges with a preference, the
/// first of equals; a merged element counts as three bytes. "ring" replaces a "gather" that has no
/// room for a KV head. Throws std::invalid_argument for rows of another number of ranks.
ExchangeChoice choose_exchange(const ExchangedLayer& exchanged, int64_t max_scratch_bytes);

/// Chooses for partial results of a decode step, whose heads ranks share as evenly as possible. The
/// second round of "all_to_all", which brings all heads to all ranks, counts as 256 KiB.
ExchangeChoice choose_state_exchange(
    int64_t num_tokens, int64_t num_heads, int64_t output_bytes, int64_t num_ranks, bool all_heads
);

/// Sizes of a layer of sparse attention: bytes of a token in all heads, or of a key.
struct SparseBytes {
  int64_t topk = 1;
  int64_t query = 0, result = 0;  // result includes its LSE
  int64_t asking = 0;             // queries and weights of the indexer
  int64_t latent = 0;
  int64_t index_key = 0;  // with its scale
};
/// Chooses for sparse attention, if no two rows of a rank select the same key. `visible` has the
/// number of keys that each row of all ranks sees, rank after rank. "pass_q" replaces a "gather"
/// that has no room for index keys.
ExchangeChoice choose_sparse_exchange(
    std::span<const int64_t> keys,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> visible,
    const SparseBytes& sizes,
    int64_t max_scratch_bytes
);

}  // namespace cpattn
