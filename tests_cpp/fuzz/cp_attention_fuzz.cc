// SPDX-License-Identifier: Apache-2.0
// Attention of all ranks of a context-parallel group, put together again, against the oracle on the
// whole batch.
#include "cpattn/context_parallel/cp_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpattn/reference/reference.h"
#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Ranks = std::vector<ContextParallelMetadata>;

constexpr int64_t kMaxTokens = 40;  // of a batch that runs

struct Input {
  Ints extend_lens, seq_lens;
  CpBatch batch;
  int64_t page_size = 1, num_pages = 1, num_heads = 1, num_kv_heads = 1;
  int64_t head_dim = 16, v_head_dim = 16;
  DType dtype = DType::float32;
};

void read_batch(Reader& in, Input& input) {
  CpBatch& batch = input.batch;
  batch.strategy = static_cast<CpStrategy>(in.between(0, 2));
  batch.kv_len_convention = static_cast<KvLenConvention>(in.rarely(4) ? 1 : 0);
  batch.cp_size = in.between(1, 4);
  for (int64_t s = in.between(1, 3); s > 0; --s) {
    input.extend_lens.push_back(in.between(0, 12));
    input.seq_lens.push_back(input.extend_lens.back() + (in.flag() ? in.between(0, 9) : 0));
  }
  batch.extend_lens = input.extend_lens;
  if (in.flag()) batch.seq_lens = input.seq_lens;
  if (in.rarely(8)) {
    int64_t total = in.between(0, 4);
    for (const int64_t length : input.extend_lens) total += length;
    batch.num_tokens = total;
  }
}

void read_shape(Reader& in, Input& input) {
  input.page_size = in.between(1, 4);
  input.num_pages = in.between(1, 12);
  input.num_kv_heads = in.between(1, 2);
  input.num_heads = input.num_kv_heads * in.between(1, 2);
  input.head_dim = in.one_of({16, 32});
  input.v_head_dim = in.one_of({16, 32});
  input.dtype = in.one_of({DType::float32, DType::bfloat16});
}

/// Segments are the rows of the rank, at the positions that its metadata says.
void check_segments(const ContextParallelMetadata& rank) {
  const std::vector<int32_t> requests = query_request_indices(rank);
  const std::vector<int32_t> lengths = query_cache_lengths(rank);
  std::vector<bool> is_seen(requests.size(), false);
  for (const AttentionSegment& segment : cp_segments(rank)) {
    for (int64_t i = 0; i < segment.q_len; ++i) {
      const int64_t row = segment.q_begin + i;
      FUZZ_CHECK(row >= 0 && row < std::ssize(requests) && !is_seen[row]);
      is_seen[row] = true;
      const int64_t position = segment.first_position + i * segment.position_step;
      FUZZ_CHECK(requests[row] == segment.table_row && lengths[row] == position + 1);
      FUZZ_CHECK(segment.kv_len > position);
    }
  }
  FUZZ_CHECK(std::ranges::all_of(is_seen, [](bool seen) { return seen; }));
}

/// Rows of tokens [tokens], behind them rows of padding.
Tensor take_rows(const Tensor& all, std::span<const int32_t> tokens, int64_t padding) {
  const TensorView& from = all.view();
  const int64_t width = from.shape[1];
  Tensor rows(from.dtype, Ints{std::ssize(tokens) + padding, width});
  const int64_t row_bytes = width * element_size(from.dtype);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::memcpy(
        rows.view().as<char>() + static_cast<int64_t>(i) * row_bytes,
        from.as<char>() + tokens[i] * row_bytes, row_bytes
    );
  }
  return rows;
}

struct Results {
  std::vector<double> out;  // [tokens, num_heads * v_head_dim]
  std::vector<int> num_times;
};

/// False if the arguments are refused.
bool run_rank(
    const Input& input,
    const ContextParallelMetadata& rank,
    CpAttentionArguments arguments,
    const Tensor& q,
    int64_t padding,
    Results& results
) {
  const std::vector<int32_t> tokens = local_q_indices(rank);
  const Tensor rows = take_rows(q, tokens, padding);
  const int64_t num_rows = rows.view().shape[0], width = input.num_heads * input.v_head_dim;
  Tensor out(input.dtype, Ints{num_rows, width});
  Tensor lse(DType::float32, Ints{num_rows, input.num_heads});
  arguments.q = rows.view();
  arguments.out = out.view();
  arguments.lse = lse.view();
  const bool ran = accepted([&] {
                     do_cp_attn_fia(rank, arguments);
                     return true;
                   }).has_value();
  if (!ran) return false;
  for (int64_t row = 0; row < num_rows; ++row) {
    const bool is_token = row < std::ssize(tokens);
    if (is_token) ++results.num_times.at(tokens[row]);
    for (int64_t i = 0; i < width; ++i) {
      const double value = number_at(out.view(), row * width + i);
      if (is_token) results.out.at(tokens[row] * width + i) = value;
      FUZZ_CHECK(is_token || value == 0);
    }
  }
  return true;
}

/// What the options of a call point into.
struct Options {
  std::vector<Tensor> sinks, mask, bits;  // of one tensor, or none
};

/// The pairs of new tokens and keys of each sequence.
Ints pairs_of(const ContextParallelMetadata& metadata) {
  Ints pairs;
  for (int32_t s = 0; s < metadata.bs; ++s) {
    const int64_t extend = metadata.extend_lens[s];
    pairs.push_back(extend * (metadata.prefix_lens[s] + extend));
  }
  return pairs;
}

/// Makes a mask, and the same as bits.
void fill_mask(Reader& in, const Ints& pairs, Options& options) {
  int64_t size = 0, bytes = 0;
  for (const int64_t count : pairs) {
    size += count;
    bytes += (count + 7) / 8;
  }
  options.mask.emplace_back(DType::bool8, Ints{size});
  options.mask[0].fill(in.bits(4));
  options.bits.emplace_back(DType::uint8, Ints{bytes});
  const std::span<uint8_t> flags = options.mask[0].as<uint8_t>();
  const std::span<uint8_t> bits = options.bits[0].as<uint8_t>();
  std::ranges::fill(bits, uint8_t{0});
  int64_t from = 0, to = 0;
  for (const int64_t count : pairs) {
    for (int64_t i = 0; i < count; ++i) {
      bits[to + i / 8] |= static_cast<uint8_t>(flags[from + i] << i % 8);
    }
    from += count;
    to += (count + 7) / 8;
  }
}

void read_options(
    Reader& in,
    const Input& input,
    const ContextParallelMetadata& metadata,
    Options& options,
    CpAttentionArguments& arguments
) {
  KeyVisibility& visibility = arguments.visibility;
  visibility.causal = !in.rarely(4);
  if (in.rarely(4)) visibility.window = in.window();
  if (in.rarely(4)) arguments.softcap = 1.5;
  if (in.rarely(4)) {
    options.sinks.emplace_back(DType::float32, Ints{in.size_near(input.num_heads)});
    options.sinks[0].fill(in.bits(1));
    arguments.sinks = options.sinks[0].view();
  }
  if (in.rarely(4)) {
    fill_mask(in, pairs_of(metadata), options);
    const bool packed = in.flag();
    if (packed) visibility.packed_custom_mask = options.bits[0].view();
    if (!packed || in.rarely(8)) visibility.custom_mask = options.mask[0].view();
  }
  if (in.rarely(4)) {
    arguments.v_cache.reset();
    arguments.v_head_dim = in.mostly(input.v_head_dim);
  }
}

void check_results(
    const Input& input,
    const Ranks& ranks,
    const CpAttentionArguments& arguments,
    const Options& options,
    const Tensor& q,
    const Results& results
) {
  const auto [heads, v_dim] = std::pair(input.num_heads, input.v_head_dim);
  // The first dimensions of rows of `dim` ones.
  const auto cache = [&](TensorView view, int64_t dim, int64_t first) {
    view.rank = 4;
    view.shape = {input.num_pages, input.page_size, input.num_kv_heads, first};
    const int64_t token = input.num_kv_heads * dim;
    view.strides = {input.page_size * token, token, dim, 1};
    return view;
  };
  const TensorView values = arguments.v_cache ? cache(*arguments.v_cache, v_dim, v_dim)
                                              : cache(arguments.k_cache, input.head_dim, v_dim);
  TensorView q_view = q.view();
  q_view.rank = 3;
  q_view.shape = {q.view().shape[0], heads, input.head_dim};
  q_view.strides = {heads * input.head_dim, input.head_dim, 1};
  reference::PagedAttention oracle = {
      .q = q_view,
      .k_cache = cache(arguments.k_cache, input.head_dim, input.head_dim),
      .v_cache = values,
      .page_size = input.page_size,
      .q_lens = {},
      .kv_lens = {},
      .block_tables = arguments.block_tables,
      .scale = arguments.scale,
      .causal = arguments.visibility.causal,
      .window = arguments.visibility.window,
      .custom_mask = std::nullopt,
      .softcap = arguments.softcap,
      .sinks = arguments.sinks,
  };
  if (!options.mask.empty()) oracle.custom_mask = options.mask[0].view();
  const ContextParallelMetadata& first = ranks[0];
  for (int32_t s = 0; s < first.bs; ++s) {
    oracle.q_lens.push_back(first.extend_lens[s]);
    // Keys of a sequence without new tokens are not asked for.
    oracle.kv_lens.push_back(
        first.extend_lens[s] == 0 ? 0 : first.prefix_lens[s] + first.extend_lens[s]
    );
  }
  const int64_t tokens = first.total_seq_lens;
  Tensor out(DType::float64, Ints{tokens, heads, v_dim}), lse(DType::float64, Ints{tokens, heads});
  reference::paged_attention(oracle, out.view(), lse.view());
  const double tolerance = input.dtype == DType::float32 ? 1e-4 : 0.02;
  for (int64_t i = 0; i < tokens * heads * v_dim; ++i) {
    const double expected = out.as<double>()[i];
    FUZZ_CHECK(std::abs(results.out[i] - expected) <= tolerance * (1 + std::abs(expected)));
  }
  FUZZ_CHECK(std::ranges::all_of(results.num_times, [](int n) { return n == 1; }));
}

}  // namespace

void run(Reader in) {
  Input input;
  read_batch(in, input);
  read_shape(in, input);
  const auto ranks = accepted([&] { return build_cp_metadata_all_ranks(input.batch); });
  if (!ranks || ranks->front().total_seq_lens > kMaxTokens) return;
  if (input.batch.kv_len_convention == KvLenConvention::baked) {
    for (const ContextParallelMetadata& rank : *ranks) check_segments(rank);
  }
  int64_t columns = 0;
  for (const int64_t length : input.seq_lens) {
    columns = std::max(columns, (length + input.page_size - 1) / input.page_size);
  }
  const Table table(in, in.size_near(ranks->front().bs), in.size_near(columns), [&] {
    return in.mostly(in.between(0, input.num_pages - 1), 256);
  });
  const int64_t tokens = ranks->front().total_seq_lens;
  Tensor q(input.dtype, Ints{tokens, input.num_heads * input.head_dim});
  const int64_t pages = input.num_pages * input.page_size * input.num_kv_heads;
  Tensor k(input.dtype, Ints{pages, input.head_dim}), v(input.dtype, Ints{pages, input.v_head_dim});
  const uint64_t seed = in.bits(2);
  q.fill(seed);
  k.fill(seed + 1);
  v.fill(seed + 2);
  CpAttentionArguments arguments = {
      .q = {},
      .k_cache = k.view(),
      .v_cache = v.view(),
      .block_tables = table.view(),
      .page_size = in.mostly(input.page_size),
      .num_heads = in.mostly(input.num_heads),
      .num_kv_heads = in.mostly(input.num_kv_heads),
      .scale = 0.25,
      .out = {},
      .lse = std::nullopt,
  };
  Results results = {
      .out = std::vector<double>(tokens * input.num_heads * input.v_head_dim),
      .num_times = std::vector<int>(tokens, 0),
  };
  const int64_t padding = in.rarely(4) ? in.between(0, 3) : 0;
  Options options;
  read_options(in, input, ranks->front(), options, arguments);
  bool ran = true;
  for (const ContextParallelMetadata& rank : *ranks) {
    ran = run_rank(input, rank, arguments, q, padding, results) && ran;
  }
  const bool is_intact = arguments.page_size == input.page_size &&
                         arguments.num_heads == input.num_heads &&
                         arguments.num_kv_heads == input.num_kv_heads &&
                         arguments.v_head_dim.value_or(input.v_head_dim) == input.v_head_dim;
  if (ran && is_intact) check_results(input, *ranks, arguments, options, q, results);
}

}  // namespace cpattn::fuzz
