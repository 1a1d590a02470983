// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cpattn/context_parallel/head_shares.h"

namespace cpattn {

/// An LSE, float32, of each token and head.
inline constexpr int64_t kLseBytes = 4;

/// Heads of a layer, and the bytes of a token in one of them.
struct LayerBytes {
  int64_t num_heads = 1, num_kv_heads = 1;
  int64_t query = 0, key = 0;  // a key with its value
  int64_t output = 0;
  int64_t merged = 0;  // elements of an output

  /// The keys and values of a token.
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

/// The rows of each rank go to all others, at once or, by a ring, from each to the next one.
Traffic send_rows(std::span<const int64_t> rows, int64_t row_bytes, bool by_ring);
/// Queries of each rank go to all others, and a state of each token comes back from all of them.
RoundTrip send_queries(std::span<const int64_t> tokens, int64_t query_bytes, int64_t state_bytes);
/// Queries and keys go to the rank of their heads, and results in these heads come back. KV heads
/// count as often as ranks have them. `heads` and `kv_heads` are those of each rank.
RoundTrip send_by_heads(
    std::span<const int64_t> tokens,
    std::span<const int64_t> keys,
    const LayerBytes& layer,
    std::span<const int64_t> heads,
    std::span<const int64_t> kv_heads,
    int64_t result_bytes
);

/// Rows of a batch that each rank has [ranks].
struct HeldRows {
  std::vector<int64_t> tokens;    // that it computes
  std::vector<int64_t> keys;      // that it keeps, cached and new: these go round a ring
  std::vector<int64_t> seen;      // that it keeps, of these the ones from the first that is seen
  std::vector<int64_t> new_keys;  // that it keeps, of these the new ones
  std::vector<int64_t> arriving;  // new ones that it keeps and another rank computes
};

/// Ranks in rows, one for each place on a ring; those of a row share heads.
using RankMesh = std::vector<std::vector<int64_t>>;

/// A layer of a batch that ranks exchange. With `writes`, new rows go to the ranks that keep them,
/// too. The mesh is empty where ranks are in none.
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
  /// Place among equals for "auto", the lowest first; -1 where "auto" has another reason.
  int preference = -1;
  /// Counts the outputs of a head that the rank that merges most merges; null if none does.
  int64_t (*merged)(const ExchangedLayer&) = nullptr;
  bool needs_mesh = false;
  bool needs_even_heads = false;  ///< For "auto": ranks have as many heads and KV heads each.
  bool needs_shards = false;      ///< It has no meaning where every rank has all keys.
  /// Whether it reads each shard where it is, so that scales of tokens fit, and each rank may have
  /// its own scales; the others read copies of all ranks' keys.
  bool reads_in_place = false;
  /// Whether it writes new keys itself, some heads while it attends with others.
  bool writes = true;
  bool rounds_twice = false;  ///< Results are merged of rounded partial results.
  /// Whether it sends the LSE only where it is wanted, so that all ranks must want it, or none.
  bool sends_wanted_lse = false;
};
/// All of them, in the order in which they are listed.
std::span<const Exchange> exchanges();

/// An exchange, the sizes that decided, and the bytes of the rank that receives most by each.
struct ExchangeChoice {
  std::string exchange, reason;
  std::vector<std::pair<std::string, int64_t>> received;
};

/// Chooses for a layer of a prefill: the fewest bytes among the exchanges with a preference, an
/// element that is merged counting as three; of equal ones the first. "ring" takes the place of a
/// "gather" that has no room for a KV head. Throws std::invalid_argument for rows of other ranks.
ExchangeChoice choose_exchange(const ExchangedLayer& exchanged, int64_t max_scratch_bytes);

/// Chooses for partial results of a decode step, whose heads ranks share as evenly as can be. The
/// second round of "all_to_all", by which all ranks get all heads, counts as 256 KiB.
ExchangeChoice choose_state_exchange(
    int64_t num_tokens, int64_t num_heads, int64_t output_bytes, int64_t num_ranks, bool all_heads
);

/// Sizes of a layer of sparse attention: bytes of a token in all heads, or of a key.
struct SparseBytes {
  int64_t topk = 1;
  int64_t query = 0, result = 0;  // the latter with its LSE
  int64_t asking = 0;             // queries and weights of the indexer
  int64_t latent = 0;
  int64_t index_key = 0;  // with its scale
};
/// Chooses for sparse attention, if no two rows of a rank select the same key. `visible` has the
/// keys that each row of all ranks sees, rank after rank. "pass_q" takes the place of a "gather"
/// that has no room for index keys.
ExchangeChoice choose_sparse_exchange(
    std::span<const int64_t> keys,
    std::span<const int64_t> rows_per_rank,
    std::span<const int64_t> visible,
    const SparseBytes& sizes,
    int64_t max_scratch_bytes
);

}  // namespace cpattn
