// SPDX-License-Identifier: Apache-2.0
#include <iterator>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/sparse/dsa_metadata.h"
#include "meta/sparse/dsa_metadata_parts.h"

namespace cpattn {
namespace {

constexpr char kName[] = "DsaMetadata";
using Ints = DsaMetadata::Ints;

void check_sizes(const DsaMetadataState& state, int64_t sequences, int64_t rows) {
  check(state.forward_mode != ForwardMode::prebuilt, kName, ": forward_mode must not be PREBUILT");
  check(
      state.topk >= 1 && state.topk <= INT32_MAX && state.page_size >= 1 &&
          state.page_size <= INT32_MAX,
      kName, ": topk and page_size must be in [1, ", INT32_MAX, "], got ", state.topk, " and ",
      state.page_size
  );
  check(
      state.num_rows >= rows && state.num_rows <= INT32_MAX, kName, ": num_rows must be at least ",
      rows, " and fit into int32, got ", state.num_rows
  );
  check(
      std::ssize(state.cache_seqlens) == sequences && std::ssize(state.token_to_batch_idx) == rows,
      kName, ": cache_seqlens must be as long as bs_idx, and token_to_batch_idx as ",
      "seqlens_expanded, got ", state.cache_seqlens.size(), ", ", sequences, ", ",
      state.token_to_batch_idx.size(), " and ", rows
  );
}

void check_sequences(const DsaMetadataState& state, int64_t sequences) {
  int64_t next = 0;
  int64_t num_keys = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    check(
        state.bs_idx[s] >= next && state.bs_idx[s] < INT32_MAX, kName,
        ": bs_idx must rise from 0 or more, got ", state.bs_idx[s], " at index ", s
    );
    next = state.bs_idx[s] + 1;
    check(
        state.cache_seqlens[s] >= 0 && state.cache_seqlens[s] <= INT32_MAX - num_keys, kName,
        ": cache_seqlens must be >= 0 and their sum fit into int32, got ", state.cache_seqlens[s],
        " at index ", s
    );
    num_keys += state.cache_seqlens[s];
  }
}

void check_rows(const DsaMetadataState& state, int64_t sequences, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t s = state.token_to_batch_idx[i];
    check(
        s >= 0 && s < sequences, kName, ": token_to_batch_idx must be in [0, ", sequences,
        "), got ", s, " at index ", i
    );
    check(
        state.seqlens_expanded[i] > INT32_MIN &&
            state.seqlens_expanded[i] <= state.cache_seqlens[s],
        kName, ": seqlens_expanded must be at most the keys of the sequence, ",
        state.cache_seqlens[s], ", got ", state.seqlens_expanded[i], " at index ", i
    );
  }
}

void check_state(const DsaMetadataState& state) {
  const int64_t sequences = std::ssize(state.bs_idx);
  const int64_t rows = std::ssize(state.seqlens_expanded);
  check_sizes(state, sequences, rows);
  check_sequences(state, sequences);
  check_rows(state, sequences, rows);
  const bool ragged = state.topk_transform_method == TopkTransformMethod::ragged;
  check(
      !ragged || state.forward_mode == ForwardMode::extend, kName,
      ": topk_transform_method must be PAGED but for EXTEND"
  );
  check(
      !state.has_flattened || (ragged && state.page_table_1), kName,
      ": page_table_1_flattened needs RAGGED and page_table_1"
  );
}

}  // namespace

DsaMetadataState state_of(const DsaMetadata& metadata) {
  const auto widened = [](const Ints& values) {
    return DsaMetadataState::Lens(values.begin(), values.end());
  };
  DsaMetadataState state{
      .forward_mode = metadata.forward_mode,
      .topk_transform_method = metadata.topk_transform_method,
      .topk = metadata.topk,
      .page_size = metadata.page_size,
      .bs_idx = widened(metadata.bs_idx),
      .cache_seqlens = widened(metadata.cache_seqlens),
      .token_to_batch_idx = widened(metadata.token_to_batch_idx),
      .seqlens_expanded = widened(metadata.seqlens_expanded),
      .num_rows = std::ssize(metadata.dsa_cache_seqlens),
      .has_flattened = metadata.page_table_1_flattened.has_value(),
  };
  if (metadata.page_table_1) state.page_table_1 = widened(*metadata.page_table_1);
  return state;
}

DsaMetadata metadata_of(const DsaMetadataState& state) {
  DsaBatch batch{
      .forward_mode = state.forward_mode,
      .seq_lens = state.cache_seqlens,
      .topk = state.topk,
      .page_size = state.page_size,
  };
  check_state(state);
  DsaMetadata out;
  out.forward_mode = state.forward_mode;
  out.topk_transform_method = state.topk_transform_method;
  out.topk = static_cast<int32_t>(state.topk);
  out.page_size = static_cast<int32_t>(state.page_size);
  const auto narrowed = [](const DsaMetadataState::Lens& values) {
    return Ints(values.begin(), values.end());
  };
  Ints lengths = narrowed(state.seqlens_expanded);
  select_sequences(out, narrowed(state.token_to_batch_idx), state.cache_seqlens, true);
  fill_rows(out, std::move(lengths), state.num_rows);
  if (state.page_table_1) {
    const int64_t sequences = std::ssize(state.bs_idx);
    check(
        std::ssize(*state.page_table_1) == sequences * out.max_seqlen_k, kName,
        ": page_table_1 must have ", sequences * out.max_seqlen_k, " elements, got ",
        state.page_table_1->size()
    );
    batch.req_to_token = IndexTable{
        .data = state.page_table_1->data(),
        .is_int64 = true,
        .rows = sequences,
        .columns = out.max_seqlen_k,
        .row_stride = out.max_seqlen_k,
    };
    fill_page_tables(out, batch);
    if (state.has_flattened) out.page_table_1_flattened = flattened(out);
  }
  out.bs_idx = narrowed(state.bs_idx);
  return out;
}

}  // namespace cpattn
