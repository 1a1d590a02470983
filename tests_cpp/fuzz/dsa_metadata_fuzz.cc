// SPDX-License-Identifier: Apache-2.0
// Metadata of sparse-attention batches, with and without context parallelism, row by row.
#include "cpattn/sparse/dsa_metadata.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;

constexpr int64_t kMaxRows = 4096;  // of accepted batches: their arrays take memory

struct Input {
  Ints seq_lens;
  std::optional<Ints> extend_lens, req_pool_indices;
  std::vector<Table> table;  // one or none
  std::optional<ContextParallelMetadata> cp;
  DsaBatch batch;
  int64_t num_rows = 0;  // of all sequences, as far as they are sensible
};

void read_lens(Reader& in, Input& input) {
  DsaBatch& batch = input.batch;
  const int64_t size = in.between(0, 5);
  const bool decode = is_decode_or_idle(batch.forward_mode);
  const bool speculative = batch.forward_mode == ForwardMode::target_verify ||
                           batch.forward_mode == ForwardMode::draft_extend_v2;
  Ints extend_lens =
      in.list(in.size_near(size), [&] { return in.mostly(decode ? 1 : in.between(0, 12), 256); });
  if (speculative && in.flag()) {
    batch.num_draft_tokens = in.mostly(in.between(1, 4));
    std::fill(extend_lens.begin(), extend_lens.end(), *batch.num_draft_tokens);
  }
  for (int64_t s = 0; s < size; ++s) {
    const int64_t extend =
        s < std::ssize(extend_lens) ? std::clamp<int64_t>(extend_lens[s], 0, INT32_MAX) : 1;
    input.seq_lens.push_back(in.mostly(in.flag() ? extend : extend + in.between(0, 20), 256));
    input.num_rows += extend;
  }
  batch.seq_lens = input.seq_lens;
  const bool are_given = batch.num_draft_tokens || decode ? in.rarely(4) : !in.rarely();
  if (!are_given) return;
  input.extend_lens = std::move(extend_lens);
  batch.extend_lens = *input.extend_lens;
}

void read_table(Reader& in, Input& input) {
  DsaBatch& batch = input.batch;
  batch.page_size = in.mostly(in.between(1, 4));
  if (!in.flag()) return;
  const auto size = std::ssize(input.seq_lens);
  int64_t width = 0;
  for (const int64_t length : input.seq_lens)
    width = std::max(width, std::min<int64_t>(length, 64));
  const int64_t page_size = std::clamp<int64_t>(batch.page_size, 1, 8);
  const int64_t rows = in.size_near(size) + in.between(0, 1), columns = in.size_near(width);
  // Slots of pages, one after the other.
  int64_t next = 0, page = 0;
  input.table.emplace_back(in, rows, columns, [&] {
    const int64_t column = columns > 0 ? next % columns : 0;
    if (column % page_size == 0) page = in.between(0, 9);
    if (columns > 0 && ++next % columns == 0) page = in.between(0, 9);
    return in.mostly(page * page_size + column % page_size, 256);
  });
  batch.req_to_token = input.table[0].view();
  if (!in.flag()) return;
  input.req_pool_indices = in.list(in.size_near(size), [&] {
    return in.mostly(in.between(0, std::max<int64_t>(rows, 1) - 1), 128);
  });
  batch.req_pool_indices = *input.req_pool_indices;
}

void read_cp(Reader& in, Input& input) {
  CpBatch cp = {
      .extend_lens =
          input.extend_lens ? std::optional<CpBatch::Lens>(*input.extend_lens) : std::nullopt,
      .seq_lens = input.seq_lens,
      .num_tokens = std::nullopt,
      .cp_size = in.between(1, 4),
      .strategy = static_cast<CpStrategy>(in.between(0, 2)),
      .kv_len_convention = static_cast<KvLenConvention>(in.between(0, 1)),
      .compat = in.flag(),
  };
  if (in.rarely(8)) cp.num_tokens = input.num_rows + in.between(0, 3);
  const int64_t rank = in.between(0, cp.cp_size - 1);
  input.cp = accepted([&] { return build_cp_metadata(cp, rank); });
  if (!input.cp) return;
  if (in.rarely(4)) {
    if (auto physical = accepted([&] { return pad_to_physical(*input.cp); })) {
      input.cp = std::move(physical);
    }
  }
  input.batch.cp = &*input.cp;
}

void read_input(Reader& in, Input& input) {
  constexpr const char* kImpls[] = {
      "flashmla_sparse",
      "flashmla_sparse_q8",
      "triton_sparse_mla",
      "flashmla_kv",
      "fa3",
      "tilelang",
      "none"
  };
  DsaBatch& batch = input.batch;
  batch.forward_mode = in.flag() ? ForwardMode::extend : static_cast<ForwardMode>(in.between(1, 9));
  batch.prefill_impl = in.one_of(kImpls);
  batch.fp8_kv_cache = in.flag();
  batch.topk = in.mostly(in.between(1, 16));
  read_lens(in, input);
  read_table(in, input);
  if (in.rarely(3)) read_cp(in, input);
  if (in.rarely(8)) {
    const int64_t rows = in.mostly(input.num_rows + in.between(0, 3), 2);
    const bool is_heavy = rows > kMaxRows && rows <= INT32_MAX;
    if (!is_heavy) batch.num_rows = rows;
  }
}

void check_rows(const Input& input, const DsaMetadata& out) {
  const DsaBatch& batch = input.batch;
  const std::size_t rows = out.seqlens_expanded.size(), n = out.bs_idx.size();
  FUZZ_CHECK(out.extend_lens.size() == n && out.cache_seqlens.size() == n);
  FUZZ_CHECK(out.cu_seqlens_k.size() == n + 1 && out.token_to_batch_idx.size() == rows);
  FUZZ_CHECK(out.ks.size() == rows && out.ke.size() == rows);
  FUZZ_CHECK(out.dsa_cache_seqlens.size() >= rows);
  std::vector<int32_t> count(n, 0);
  std::vector<std::vector<int32_t>> positions(n);
  for (std::size_t i = 0; i < rows; ++i) {
    const int32_t s = out.token_to_batch_idx[i];
    FUZZ_CHECK(s >= 0 && s < static_cast<int32_t>(n));
    ++count[s];
    positions[s].push_back(out.seqlens_expanded[i]);
    FUZZ_CHECK(out.seqlens_expanded[i] <= out.cache_seqlens[s]);
    FUZZ_CHECK(out.ks[i] == out.cu_seqlens_k[s]);
    FUZZ_CHECK(out.ke[i] == out.ks[i] + out.seqlens_expanded[i]);
    FUZZ_CHECK(out.dsa_cache_seqlens[i] == std::clamp(out.seqlens_expanded[i], 0, out.topk));
    if (out.topk_indices_offset) FUZZ_CHECK((*out.topk_indices_offset)[i] == out.ks[i]);
  }
  for (std::size_t i = rows; i < out.dsa_cache_seqlens.size(); ++i) {
    FUZZ_CHECK(out.dsa_cache_seqlens[i] == 0);
  }
  FUZZ_CHECK(count == out.extend_lens);
  for (std::size_t s = 0; s < n; ++s) {
    FUZZ_CHECK(out.cu_seqlens_k[s + 1] - out.cu_seqlens_k[s] == out.cache_seqlens[s]);
    FUZZ_CHECK(out.cache_seqlens[s] == batch.seq_lens[out.bs_idx[s]]);
    FUZZ_CHECK(out.cache_seqlens[s] <= out.max_seqlen_k && count[s] <= out.max_seqlen_q);
    // No two rows of a sequence are the same token.
    std::sort(positions[s].begin(), positions[s].end());
    FUZZ_CHECK(std::adjacent_find(positions[s].begin(), positions[s].end()) == positions[s].end());
    if (!batch.cp && count[s] > 0) FUZZ_CHECK(positions[s].back() == out.cache_seqlens[s]);
  }
  FUZZ_CHECK(batch.cp || n == batch.seq_lens.size());
  FUZZ_CHECK(
      out.topk_indices_offset.has_value() ==
      (out.topk_transform_method == TopkTransformMethod::ragged)
  );
}

void check_tables(const Input& input, const DsaMetadata& out) {
  const DsaBatch& batch = input.batch;
  FUZZ_CHECK(out.page_table_1.has_value() == batch.req_to_token.has_value());
  if (!out.page_table_1) return;
  const std::size_t n = out.bs_idx.size();
  const int64_t width = out.max_seqlen_k;
  const int64_t num_pages = (width + out.page_size - 1) / out.page_size;
  FUZZ_CHECK(out.page_table_1->size() == n * width);
  FUZZ_CHECK(out.real_page_table->size() == n * num_pages);
  std::vector<int32_t> all;
  for (std::size_t s = 0; s < n; ++s) {
    const int64_t row =
        input.req_pool_indices ? (*input.req_pool_indices)[out.bs_idx[s]] : out.bs_idx[s];
    for (int64_t j = 0; j < out.cache_seqlens[s]; ++j) {
      const int32_t slot = (*out.page_table_1)[s * width + j];
      FUZZ_CHECK(slot >= 0 && slot == batch.req_to_token->at(row, j));
      const int32_t page = (*out.real_page_table)[s * num_pages + j / out.page_size];
      if (j % out.page_size == 0) FUZZ_CHECK(int64_t{page} * out.page_size == slot);
      all.push_back(slot);
    }
  }
  if (out.page_table_1_flattened) FUZZ_CHECK(*out.page_table_1_flattened == all);
}

}  // namespace

void run(Reader in) {
  Input input;
  read_input(in, input);
  const int64_t drafts =
      std::clamp<int64_t>(input.batch.num_draft_tokens.value_or(0), 0, INT32_MAX);
  if (input.num_rows > kMaxRows || drafts > kMaxRows) return;
  if (input.cp && input.cp->total_seq_lens > kMaxRows) return;
  const auto metadata = accepted([&] { return build_dsa_metadata(input.batch); });
  if (!metadata) return;
  check_rows(input, *metadata);
  check_tables(input, *metadata);
  FUZZ_CHECK(*metadata == build_dsa_metadata(input.batch));
}

}  // namespace cpattn::fuzz
