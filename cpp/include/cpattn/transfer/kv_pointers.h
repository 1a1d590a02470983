// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cpattn/transfer/index_range.h"

namespace cpattn {

// The lists of buffers that prefill and decode servers register hold groups of layers: all K,
// then all V, then all index-K if there are any; after them the groups of the draft layers. A
// pipeline stage holds a range of the model's layers, a decode server usually all of them. The
// functions here return the entries of the destination's list that receive the source's entries.
//
// Functions are strict unless `compat` is set: they return correct ranges or throw
// std::invalid_argument. With `compat` they return the engines' ranges, clipped like slices in
// Python, which are wrong for some layouts.

/// Ranges of entries of two lists that belong together.
struct MhaEntries {
  IndexRange src_k, src_v, dst_k, dst_v;
  int64_t num_layers = 0;
};

/// The entries of lists of two groups, K and V, each of half a list. total_kv_layers is the number
/// of target layers of the whole model; 0 for unknown, which is refused where drafts and layers
/// cannot be told apart. `compat` does not read it.
MhaEntries mha_kv_entries(
    int64_t num_src,
    int64_t num_dst,
    int64_t prefill_start_layer,
    int64_t total_kv_layers,
    bool compat
);

/// Facts that a prefill server knows about its buffers.
struct KVStage {
  int64_t prefill_start_layer = 0;
  int64_t kv_buf_groups = 1;
  int64_t total_kv_layers = 0;               // target layers of the model; 0 for unknown
  std::optional<int64_t> hidden_kv_layers;   // the same number; if given, drafts are told apart
  int64_t draft_kv_layers = 0;               // draft layers of the last stage
  bool is_last_rank = false;                 // whether this is the last stage
  std::optional<int64_t> num_draft_entries;  // if given, one group, whose last entries are drafts
};

/// Ranges of the destination's list which, one after the other, receive the source's entries,
/// for any number of groups. It is always strict; its errors name `function`.
std::vector<IndexRange> match_kv_entries(
    const char* function, int64_t num_src, int64_t num_dst, const KVStage& stage
);

/// The ranges of match_kv_entries or, with `compat`, those of the engines' three rules. With
/// num_draft_entries this is the rule for lists of one group, which looks for drafts at the end of
/// the list.
std::vector<IndexRange> mla_kv_entries(
    int64_t num_src, int64_t num_dst, const KVStage& stage, bool compat
);

/// Pairs (source entry, destination entry) that hold the same layer. A layer id that occurs
/// several times (K and V) is paired in order of occurrence; num_src == 0 gives no pairs. Without
/// ids, entries pair by position if there are equally many, or at least as many destination
/// entries and allow_positional_fallback. Entries that cannot be paired throw std::runtime_error,
/// which engines catch.
std::vector<std::pair<int64_t, int64_t>> build_transfer_entry_pairs(
    std::span<const int64_t> src_layer_ids,
    std::span<const int64_t> dst_layer_ids,
    int64_t num_src,
    int64_t num_dst,
    bool allow_positional_fallback
);

/// Counts the layers with a KV cache (ascending ids) before a pipeline stage: the meaning of
/// prefill_start_layer for models of which only some layers have one.
int64_t kv_start_layer(int64_t start_layer, std::span<const int64_t> kv_layer_ids);

/// Prefill ranks that send to a decode rank of another tensor-parallel size.
struct DecodeTargets {
  IndexRange ranks;                   // within the prefill's tensor-parallel group
  int64_t num_real = 0;               // the first num_real ranks hold data; the others get dummies
  int64_t required_dst_info_num = 0;  // decode ranks that each rank waits for
};

/// The prefill ranks that send to a decode rank. Throws std::invalid_argument unless one size
/// divides the other.
DecodeTargets decode_targets(
    int64_t engine_rank, int64_t prefill_tp_size, int64_t decode_tp_size, bool is_mla
);

}  // namespace cpattn
