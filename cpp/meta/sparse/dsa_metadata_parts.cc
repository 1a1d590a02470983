// SPDX-License-Identifier: Apache-2.0
#include "meta/sparse/dsa_metadata_parts.h"

#include <algorithm>
#include <utility>

#include "cpattn/base/check.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "build_dsa_metadata";
using Ints = std::vector<int32_t>;

/// Returns 0 and the running sums, or nothing if they exceed int32.
std::optional<Ints> running_sums(const Ints& lens) {
  Ints sums(lens.size() + 1);
  int64_t sum = 0;
  for (std::size_t i = 0; i < lens.size(); ++i) {
    sum += lens[i];
    if (sum > INT32_MAX) return std::nullopt;
    sums[i + 1] = static_cast<int32_t>(sum);
  }
  return sums;
}

int32_t floor_divide(int32_t a, int32_t b) { return a >= 0 ? a / b : -1 - (-1 - a) / b; }

/// The row of req_to_token of each sequence.
std::vector<int64_t> table_rows(const DsaBatch& batch, const Ints& bs_idx) {
  const int64_t height = batch.req_to_token->rows;
  const auto bs = static_cast<int64_t>(batch.seq_lens.size());
  const auto& indices = batch.req_pool_indices;
  check(
      indices ? static_cast<int64_t>(indices->size()) == bs : height >= bs, kFunction, ": ",
      indices ? "req_pool_indices" : "req_to_token", " must have a row for each of the ", bs,
      " sequences, got ", indices ? static_cast<int64_t>(indices->size()) : height
  );
  std::vector<int64_t> rows;
  for (int32_t s : bs_idx) {
    const int64_t row = indices ? (*indices)[s] : s;
    check(
        row >= 0 && row < height, kFunction, ": req_pool_indices must be in [0, ", height,
        "), got ", row, " at index ", s
    );
    rows.push_back(row);
  }
  return rows;
}

}  // namespace

void select_sequences(
    DsaMetadata& out, const std::vector<int32_t>& requests, DsaBatch::Lens seq_lens, bool keep_all
) {
  Ints num_rows(seq_lens.size(), 0);
  for (int32_t request : requests) ++num_rows[request];
  Ints place(seq_lens.size());
  for (std::size_t s = 0; s < seq_lens.size(); ++s) {
    if (num_rows[s] == 0 && !keep_all) continue;
    place[s] = static_cast<int32_t>(out.bs_idx.size());
    out.bs_idx.push_back(static_cast<int32_t>(s));
    out.extend_lens.push_back(num_rows[s]);
    out.cache_seqlens.push_back(static_cast<int32_t>(seq_lens[s]));
    out.max_seqlen_q = std::max(out.max_seqlen_q, num_rows[s]);
    out.max_seqlen_k = std::max(out.max_seqlen_k, out.cache_seqlens.back());
  }
  out.cu_seqlens_k = *running_sums(out.cache_seqlens);
  out.token_to_batch_idx.resize(requests.size());
  std::transform(
      requests.begin(), requests.end(), out.token_to_batch_idx.begin(),
      [&place](int32_t request) { return place[request]; }
  );
  if (std::is_sorted(requests.begin(), requests.end())) {
    out.cu_seqlens_q = running_sums(out.extend_lens);
  }
}

void fill_rows(DsaMetadata& out, std::vector<int32_t> lengths, int64_t num_rows) {
  const auto rows = static_cast<int64_t>(lengths.size());
  out.ks.resize(rows);
  out.ke.resize(rows);
  out.dsa_cache_seqlens.assign(num_rows, 0);
  for (int64_t i = 0; i < rows; ++i) {
    out.ks[i] = out.cu_seqlens_k[out.token_to_batch_idx[i]];
    out.ke[i] = out.ks[i] + lengths[i];
    out.dsa_cache_seqlens[i] = std::clamp(lengths[i], 0, out.topk);
  }
  out.dsa_cu_seqlens_k = running_sums(out.dsa_cache_seqlens);
  out.seqlens_expanded = std::move(lengths);
  if (out.topk_transform_method == TopkTransformMethod::ragged) out.topk_indices_offset = out.ks;
}

void fill_page_tables(DsaMetadata& out, const DsaBatch& batch) {
  const IndexTable& slots = *batch.req_to_token;
  const std::vector<int64_t> rows = table_rows(batch, out.bs_idx);
  const int64_t width = out.max_seqlen_k;
  check(
      slots.columns >= width, kFunction, ": req_to_token must have a column for each of the ",
      width, " keys of the longest sequence, got ", slots.columns
  );
  const int32_t page_size = out.page_size;
  const int64_t num_pages = (width + page_size - 1) / page_size;
  Ints table(rows.size() * width), pages(rows.size() * num_pages);
  for (std::size_t s = 0; s < rows.size(); ++s) {
    int32_t* row = table.data() + s * width;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t slot = slots.at(rows[s], j);
      check(
          slot >= INT32_MIN && slot <= INT32_MAX && (slot >= 0 || j >= out.cache_seqlens[s]),
          kFunction, ": req_to_token must be >= 0 where there are keys and fit into int32, got ",
          slot, " at [", rows[s], ", ", j, "]"
      );
      row[j] = static_cast<int32_t>(slot);
    }
    for (int64_t page = 0; page < num_pages; ++page) {
      const int32_t first = row[page * page_size];
      check(
          page * page_size >= out.cache_seqlens[s] || first % page_size == 0, kFunction, ": key ",
          page * page_size, " must be the first of a page of ", page_size, ", got slot ", first,
          " in row ", rows[s], " of req_to_token"
      );
      pages[s * num_pages + page] = floor_divide(first, page_size);
    }
  }
  out.page_table_1 = std::move(table);
  out.real_page_table = std::move(pages);
}

std::vector<int32_t> flattened(const DsaMetadata& metadata) {
  Ints slots;
  slots.reserve(metadata.cu_seqlens_k.back());
  const int32_t* row = metadata.page_table_1->data();
  for (int32_t length : metadata.cache_seqlens) {
    slots.insert(slots.end(), row, row + length);
    row += metadata.max_seqlen_k;
  }
  return slots;
}

}  // namespace cpattn
