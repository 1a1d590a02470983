// SPDX-License-Identifier: Apache-2.0
// The arguments of npu_lightning_indexer and npu_sparse_flash_attention: layouts, lengths, block
// tables and indices. What is accepted runs in memory of just the stated size.
#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "cpattn/npu/lightning_indexer.h"
#include "cpattn/npu/sparse_flash_attention.h"
#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Lengths = std::optional<Ints>;

/// What both operators are given.
struct Batch {
  std::string layout_query, layout_key;
  int64_t batch = 1, q_len = 1, kv_len = 1, num_blocks = 1, block_size = 1, num_heads = 1;
  DType dtype = DType::float32;
  Lengths q_lens, kv_lens;
  std::deque<Table> tables;
  std::deque<Tensor> tensors;

  bool packed() const { return layout_query == "TND"; }
  bool paged() const { return layout_key == "PA_BSND"; }
  Ints query_tokens() const { return packed() ? Ints{batch * q_len} : Ints{batch, q_len}; }
  Ints key_tokens() const {
    if (paged()) return {num_blocks, block_size};
    return layout_key == "TND" ? Ints{batch * kv_len} : Ints{batch, kv_len};
  }
};

/// The tokens and what belongs to each, mostly.
TensorView add_tensor(Reader& in, Batch& batch, DType dtype, Ints shape, const Ints& last) {
  shape.insert(shape.end(), last.begin(), last.end());
  for (int64_t& size : shape) size = in.size_near(size);
  Tensor& tensor = batch.tensors.emplace_back(dtype, shape, &in, 8);
  tensor.fill(in.bits(1));
  return tensor.view();
}

Ints read_lengths(Reader& in, int64_t size, int64_t largest, bool sums) {
  Ints lengths;
  int64_t sum = 0;
  for (int64_t i = in.size_near(size); i > 0; --i) {
    const int64_t length = in.flag() ? largest : in.between(0, largest);
    sum += length;
    lengths.push_back(in.mostly(sums ? sum : length, 128));
  }
  return lengths;
}

void read_batch(Reader& in, Batch& batch) {
  batch.layout_query = in.flag() ? "TND" : "BSND";
  batch.layout_key = in.flag() ? "PA_BSND" : batch.layout_query;
  if (in.rarely(64)) batch.layout_key = in.one_of({"TND", "BSND", "PA_BSND", "BNSD", ""});
  batch.batch = in.between(0, 3);
  batch.q_len = in.between(0, 3);
  batch.kv_len = in.between(0, 9);
  batch.num_blocks = in.between(1, 4);
  batch.block_size = in.between(1, 4);
  batch.num_heads = in.between(1, 3);
  batch.dtype = in.one_of({DType::float32, DType::bfloat16, DType::float16});
  if (batch.packed() || in.flag()) {
    batch.q_lens = read_lengths(in, batch.batch, batch.q_len, batch.packed());
  }
  if (batch.packed() || batch.paged() || in.flag()) {
    const bool sums = batch.packed() && !batch.paged();
    batch.kv_lens = read_lengths(in, batch.batch, batch.kv_len, sums);
  }
  if (!batch.paged() && !in.rarely()) return;
  const int64_t columns = (batch.kv_len + batch.block_size - 1) / batch.block_size;
  const int64_t rows = in.size_near(batch.batch), width = in.size_near(columns);
  batch.tables.emplace_back(in, rows, width, [&] {
    return in.mostly(in.between(0, batch.num_blocks - 1), 128);
  });
}

std::optional<IndexTable> table_of(const Batch& batch) {
  return batch.tables.empty() ? std::nullopt : std::optional(batch.tables[0].view());
}

template <class Call>
bool runs(Call call) {
  return accepted(
             [&] {
               call();
               return true;
             }
  ).has_value();
}

void check_indexer(Reader& in) {
  Batch batch;
  read_batch(in, batch);
  const int64_t dim = in.one_of({16, 32, 128});
  const DType dtype = batch.dtype == DType::float16 ? DType::bfloat16 : batch.dtype;
  LightningIndexerArguments arguments = {
      .query = add_tensor(in, batch, dtype, batch.query_tokens(), {batch.num_heads, dim}),
      .key = add_tensor(in, batch, dtype, batch.key_tokens(), {1, dim}),
      .weights = add_tensor(in, batch, dtype, batch.query_tokens(), {batch.num_heads}),
      .actual_seq_lengths_query = batch.q_lens,
      .actual_seq_lengths_key = batch.kv_lens,
      .block_table = table_of(batch),
      .layout_query = batch.layout_query,
      .layout_key = batch.layout_key,
      .sparse_count = in.mostly(in.between(1, 12)),
      .sparse_mode = in.mostly(in.flag() ? 0 : 3),
      .indices = {},
      .values = std::nullopt,
  };
  const TensorView& query = arguments.query;
  Ints shape(query.shape.begin(), query.shape.begin() + std::max(query.rank - 2, 0));
  shape.push_back(1);
  shape.push_back(std::clamp<int64_t>(arguments.sparse_count, 0, 16));
  Tensor indices(DType::int32, shape), values(DType::float32, shape);
  arguments.indices = indices.view();
  if (in.flag()) arguments.values = values.view();
  if (!runs([&] { npu_lightning_indexer(arguments); })) return;
  // Distinct positions of a sequence, then -1.
  const int64_t count = arguments.sparse_count;
  const int64_t limit = batch.paged() ? arguments.block_table->columns * arguments.key.shape[1]
                                      : arguments.key.shape[batch.packed() ? 0 : 1];
  for (int64_t row = 0; row < indices.num_elements() / count; ++row) {
    const auto all = indices.as<int32_t>().subspan(row * count, count);
    const auto end = std::ranges::find(all, -1);
    Ints chosen(all.begin(), end);
    FUZZ_CHECK(std::all_of(end, all.end(), [](int32_t index) { return index == -1; }));
    std::ranges::sort(chosen);
    FUZZ_CHECK(std::ranges::adjacent_find(chosen) == chosen.end());
    FUZZ_CHECK(chosen.empty() || (chosen.front() >= 0 && chosen.back() < limit));
  }
}

void check_attention(Reader& in) {
  Batch batch;
  read_batch(in, batch);
  const int64_t dim = in.one_of({16, 32}), v_dim = in.one_of({16, 32});
  const bool has_rope = in.flag();
  const Ints query_tokens = batch.query_tokens(), key_tokens = batch.key_tokens();
  SparseFlashArguments arguments = {
      .query = add_tensor(in, batch, batch.dtype, query_tokens, {batch.num_heads, dim}),
      .key = add_tensor(in, batch, batch.dtype, key_tokens, {1, dim}),
      .value = add_tensor(in, batch, batch.dtype, key_tokens, {1, v_dim}),
      .sparse_indices = {},
      .scale_value = 0.25,
      .block_table = table_of(batch),
      .actual_seq_lengths_query = batch.q_lens,
      .actual_seq_lengths_kv = batch.kv_lens,
      .query_rope = std::nullopt,
      .key_rope = std::nullopt,
      .sparse_block_size = in.mostly(in.between(1, 3)),
      .layout_query = batch.layout_query,
      .layout_kv = batch.layout_key,
      .sparse_mode = in.mostly(in.flag() ? 0 : 3),
      .attention_mode = in.mostly(has_rope ? 2 : 0),
      .out = {},
      .softmax_max = std::nullopt,
      .softmax_sum = std::nullopt,
  };
  Ints shape = query_tokens;
  shape.push_back(1);
  shape.push_back(in.between(0, 6));
  Tensor chosen(DType::int32, shape, &in, 3);
  for (int32_t& index : chosen.as<int32_t>()) {
    index = static_cast<int32_t>(in.mostly(in.between(-1, 9), 128));
  }
  arguments.sparse_indices = chosen.view();
  if (has_rope) {
    arguments.query_rope = add_tensor(in, batch, batch.dtype, query_tokens, {batch.num_heads, 16});
    arguments.key_rope = add_tensor(in, batch, batch.dtype, key_tokens, {1, 16});
  }
  const TensorView& query = arguments.query;
  Ints out_shape(query.shape.begin(), query.shape.begin() + query.rank);
  out_shape.back() = arguments.value.shape[arguments.value.rank - 1];
  Tensor out(query.dtype, out_shape);
  arguments.out = out.view();
  if (!runs([&] { npu_sparse_flash_attention(arguments); })) return;
  // Weighted means of numbers between -2 and 2.
  for (int64_t i = 0; i < out.num_elements(); ++i) {
    FUZZ_CHECK(std::abs(number_at(out.view(), i)) <= 2.01);
  }
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {check_indexer, check_attention};
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
