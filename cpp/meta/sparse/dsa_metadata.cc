// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/dsa_metadata.h"

#include <algorithm>
#include <numeric>

#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "meta/sparse/dsa_metadata_parts.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "build_dsa_metadata";
using Ints = std::vector<int32_t>;

/// Whether the mode is one of verify or draft-extend, whose new tokens may not all be real.
bool is_speculative(ForwardMode mode) {
  return mode == ForwardMode::target_verify || mode == ForwardMode::draft_extend_v2;
}

std::vector<int64_t> resolve_extend_lens(const DsaBatch& batch) {
  const bool decode = is_decode_or_idle(batch.forward_mode);
  check(
      !batch.num_draft_tokens || (is_speculative(batch.forward_mode) && !batch.extend_lens),
      kFunction, ": num_draft_tokens is for verify and draft batches, instead of extend_lens"
  );
  if (!batch.extend_lens) {
    check(
        decode || batch.num_draft_tokens, kFunction, ": extend_lens must be given in this mode",
        is_speculative(batch.forward_mode) ? ", or num_draft_tokens" : ""
    );
    check(
        decode || *batch.num_draft_tokens >= 1, kFunction, ": num_draft_tokens must be >= 1, got ",
        batch.num_draft_tokens.value_or(1)
    );
    return std::vector<int64_t>(batch.seq_lens.size(), decode ? 1 : *batch.num_draft_tokens);
  }
  const DsaBatch::Lens lens = *batch.extend_lens;
  check(
      lens.size() == batch.seq_lens.size(), kFunction, ": extend_lens must have as many elements ",
      "as seq_lens, ", batch.seq_lens.size(), ", got ", lens.size()
  );
  for (std::size_t s = 0; decode && s < lens.size(); ++s) {
    check(
        lens[s] == 1, kFunction, ": extend_lens must be 1 in decode, got ", lens[s], " at index ", s
    );
  }
  return {lens.begin(), lens.end()};
}

void check_lens(const DsaBatch& batch, const std::vector<int64_t>& extend_lens) {
  int64_t num_rows = 0, num_keys = 0;
  for (std::size_t s = 0; s < extend_lens.size(); ++s) {
    check(
        extend_lens[s] >= 0 && extend_lens[s] <= INT32_MAX, kFunction,
        ": extend_lens must be >= 0 and fit into int32, got ", extend_lens[s], " at index ", s
    );
    check(
        batch.seq_lens[s] >= 0 && batch.seq_lens[s] <= INT32_MAX, kFunction,
        ": seq_lens must be >= 0 and fit into int32, got ", batch.seq_lens[s], " at index ", s
    );
    check(
        batch.seq_lens[s] >= extend_lens[s] || is_speculative(batch.forward_mode), kFunction,
        ": seq_lens must be >= extend_lens, got ", batch.seq_lens[s], " below ", extend_lens[s],
        " at index ", s
    );
    num_rows += extend_lens[s];
    num_keys += batch.seq_lens[s];
    check(
        num_rows <= INT32_MAX && num_keys <= INT32_MAX, kFunction,
        ": the sums of extend_lens and of seq_lens must fit into int32, got ",
        std::max(num_rows, num_keys), " at index ", s
    );
  }
}

void check_scalars(const DsaBatch& batch) {
  check(
      batch.forward_mode != ForwardMode::prebuilt, kFunction,
      ": forward_mode must not be PREBUILT, of which nothing is computed"
  );
  check(
      batch.topk >= 1 && batch.topk <= INT32_MAX, kFunction, ": topk must be in [1, ", INT32_MAX,
      "], got ", batch.topk
  );
  check_page_size(kFunction, batch.page_size);
}

void check_cp(const DsaBatch& batch, const std::vector<int64_t>& extend_lens) {
  const ContextParallelMetadata& cp = *batch.cp;
  check(
      is_context_parallel_extend(batch.forward_mode, true), kFunction,
      ": cp_metadata is for EXTEND, MIXED and DRAFT_EXTEND_V2"
  );
  check(
      cp.bs == static_cast<int64_t>(extend_lens.size()), kFunction,
      ": cp_metadata must be of this batch of ", extend_lens.size(), ", got one of ", cp.bs
  );
  for (int32_t s = 0; s < cp.bs; ++s) {
    check(
        cp.extend_lens[s] == extend_lens[s] &&
            cp.prefix_lens[s] + extend_lens[s] == batch.seq_lens[s],
        kFunction, ": cp_metadata must be of this batch, prefix + extend ",
        batch.seq_lens[s] - extend_lens[s], " + ", extend_lens[s], ", got ", cp.prefix_lens[s],
        " + ", cp.extend_lens[s], " at index ", s
    );
  }
}

/// The sequence of each row, in the batch, and the keys that the row sees.
struct Rows {
  Ints requests, lengths;
};

Rows all_rows(DsaBatch::Lens seq_lens, const std::vector<int64_t>& extend_lens) {
  const int64_t num_rows = std::accumulate(extend_lens.begin(), extend_lens.end(), int64_t{0});
  Rows rows = {Ints(num_rows), Ints(num_rows)};
  int64_t row = 0;
  for (std::size_t s = 0; s < extend_lens.size(); ++s) {
    for (int64_t i = 0; i < extend_lens[s]; ++i, ++row) {
      rows.requests[row] = static_cast<int32_t>(s);
      rows.lengths[row] = static_cast<int32_t>(seq_lens[s] - extend_lens[s] + 1 + i);
    }
  }
  return rows;
}

int64_t num_rows_of(const DsaBatch& batch, int64_t rows) {
  const int64_t physical = batch.cp ? batch.cp->per_rank_actual_token[batch.cp->cp_rank] : rows;
  const int64_t num_rows = batch.num_rows.value_or(physical);
  check(
      num_rows >= physical && num_rows <= INT32_MAX, kFunction,
      ": num_rows must be at least the rows of q, ", physical, ", and fit into int32, got ",
      num_rows
  );
  return num_rows;
}

}  // namespace

DsaMetadata build_dsa_metadata(const DsaBatch& batch) {
  check_scalars(batch);
  const std::vector<int64_t> extend_lens = resolve_extend_lens(batch);
  check_lens(batch, extend_lens);
  if (batch.cp) check_cp(batch, extend_lens);

  DsaMetadata out;
  out.forward_mode = batch.forward_mode;
  out.topk_transform_method = get_topk_transform_method(
      batch.forward_mode, batch.fp8_kv_cache, batch.prefill_impl, kFunction
  );
  out.topk = static_cast<int32_t>(batch.topk);
  out.page_size = static_cast<int32_t>(batch.page_size);
  Rows rows = batch.cp ? Rows{query_request_indices(*batch.cp), query_cache_lengths(*batch.cp)}
                       : all_rows(batch.seq_lens, extend_lens);
  const int64_t num_rows = num_rows_of(batch, static_cast<int64_t>(rows.lengths.size()));
  select_sequences(out, rows.requests, batch.seq_lens, batch.cp == nullptr);
  fill_rows(out, std::move(rows.lengths), num_rows);
  if (batch.req_to_token) {
    fill_page_tables(out, batch);
    const bool any_prefix =
        !std::equal(extend_lens.begin(), extend_lens.end(), batch.seq_lens.begin());
    const bool any_left_out = out.bs_idx.size() < extend_lens.size();
    if (out.topk_indices_offset && (any_prefix || any_left_out)) {
      out.page_table_1_flattened = flattened(out);
    }
  }
  return out;
}

}  // namespace cpattn
