// SPDX-License-Identifier: Apache-2.0
// Batches of sequences with pages and masks: how their plans divide the work, and, where they are
// small, what they compute.
#include "cpattn/attention/attention_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpattn/attention/paged_attention.h"
#include "cpattn/attention/sequence_batch.h"
#include "cpattn/reference/reference.h"
#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;

/// Beyond these a plan takes milliseconds, or its check does.
constexpr int64_t kMaxPlanned = 1 << 16;  // rows of all heads
constexpr int64_t kMaxChecked = 1000;     // likewise
constexpr int64_t kMaxProducts = 1 << 17;
constexpr int64_t kMaxCache = 1 << 16;  // elements

struct Input {
  SequenceBatch batch;
  std::vector<Table> table;  // one or none
  std::vector<Tensor> mask;
};

void read_pages(Reader& in, Input& input) {
  SequenceBatch& batch = input.batch;
  const int64_t page_size = std::clamp<int64_t>(batch.page_size, 1, 1024);
  const auto page = [&] {
    return in.mostly(in.between(0, std::clamp<int64_t>(batch.num_pages, 1, 256) - 1), 128);
  };
  if (in.flag()) {
    CsrPages csr = {.kv_indptr = {in.mostly(0)}, .kv_indices = {}, .last_page_len = {}};
    for (int64_t i = in.size_near(std::ssize(batch.q_lens)); i > 0; --i) {
      const int64_t used = in.between(0, 3);
      csr.kv_indptr.push_back(in.mostly(std::ssize(csr.kv_indices) + used));
      for (int64_t k = 0; k < used; ++k) csr.kv_indices.push_back(page());
      csr.last_page_len.push_back(in.mostly(in.between(1, page_size)));
    }
    if (in.rarely()) csr.last_page_len.resize(in.between(0, 4));
    batch.csr = std::move(csr);
    if (!in.rarely()) return;
  }
  int64_t columns = 0;
  for (const int64_t n : batch.kv_lens) {
    if (n > 0 && n < 5000) columns = std::max(columns, (n + page_size - 1) / page_size);
  }
  const int64_t rows = in.size_near(std::ssize(batch.kv_lens));
  input.table.emplace_back(in, rows, in.size_near(columns), page);
  batch.block_tables = input.table[0].view();
}

Input read_input(Reader& in) {
  Input input;
  SequenceBatch& batch = input.batch;
  const auto near = [&](int64_t value) { return static_cast<int32_t>(in.mostly(value, 128)); };
  const int64_t kv_heads = in.between(1, 3);
  batch.shape = {
      .num_heads = near(kv_heads * in.between(1, 4)),
      .num_kv_heads = near(kv_heads),
      .head_dim = near(in.one_of({16, 16, 32, 48, 272})),
      .v_head_dim = near(in.one_of({16, 32})),
  };
  const bool is_long = in.rarely();  // enough keys to divide them
  batch.page_size = in.mostly(is_long ? 64 : in.between(1, 5));
  batch.num_pages = in.mostly(in.between(1, 8));
  for (int64_t i = in.between(0, 4); i > 0; --i) {
    batch.q_lens.push_back(in.mostly(in.between(0, 5), 128));
    const int64_t before = is_long ? in.between(0, 2200) : in.between(0, 16);
    const int64_t q_len = std::clamp<int64_t>(batch.q_lens.back(), 0, INT32_MAX);
    batch.kv_lens.push_back(in.mostly(q_len + before, 128));
  }
  if (in.rarely()) batch.kv_lens.resize(in.size_near(std::ssize(batch.kv_lens)));
  read_pages(in, input);
  batch.visibility.causal = in.flag();
  if (in.rarely(4)) {
    batch.visibility.causal_of_each.emplace();
    for (int64_t i = in.size_near(std::ssize(batch.q_lens)); i > 0; --i) {
      batch.visibility.causal_of_each->push_back(in.flag());
    }
  }
  if (in.rarely(4)) {
    batch.first_positions.emplace();
    for (int64_t i = in.size_near(std::ssize(batch.q_lens)); i > 0; --i) {
      batch.first_positions->push_back(in.mostly(in.between(0, 20) - 5));
    }
  }
  if (in.rarely(4)) batch.visibility.window = in.window();
  batch.allow_short_kv = in.flag();
  batch.batch_invariant = in.flag();
  if (in.rarely(4)) batch.num_rows = in.mostly(in.between(0, 8));
  if (in.rarely(4)) {
    int64_t elements = 0;
    for (std::size_t i = 0; i < std::min(batch.q_lens.size(), batch.kv_lens.size()); ++i) {
      const bool is_small = std::min(batch.q_lens[i], batch.kv_lens[i]) >= 0 &&
                            std::max(batch.q_lens[i], batch.kv_lens[i]) < 100;
      if (is_small) elements += batch.q_lens[i] * batch.kv_lens[i];
    }
    const int64_t size = in.size_near(elements);
    const DType dtype = in.rarely() ? DType::int8 : DType::bool8;
    input.mask.emplace_back(dtype, std::span(&size, 1));
    input.mask[0].fill(in.bits(4));
    batch.visibility.custom_mask = input.mask[0].view();
  }
  return input;
}

/// Whether a plan of the batch, if it is accepted, could take long.
bool is_heavy(const SequenceBatch& batch) {
  int64_t rows = 0;
  for (const int64_t n : batch.q_lens) rows += std::clamp<int64_t>(n, 0, INT32_MAX);
  return rows * std::max<int64_t>(batch.shape.num_heads, 1) > kMaxPlanned;
}

int64_t pairs_by_hand(const AttentionBatch& batch, const AttentionItem& item) {
  const AttentionSegment& segment = batch.segments[item.segment];
  int64_t pairs = 0;
  for (int64_t t = item.first_token; t < item.first_token + item.num_tokens; ++t) {
    const int64_t position = segment.first_position + t * segment.position_step;
    const int64_t begin = std::max(item.kv_begin, position - segment.left);
    const int64_t end = std::min(item.kv_end, position + segment.right + 1);
    for (int64_t key = begin; key < end; ++key) {
      if (batch.mask.empty()) {
        pairs += end - begin;
        break;
      }
      const int64_t byte =
          batch.mask.offsets[item.segment] + t * batch.mask.row_bytes[item.segment] + key / 8;
      pairs += batch.mask.bits[byte] >> key % 8 & 1;
    }
  }
  return pairs * item.num_heads;
}

/// Every token and head meets every key it sees once.
void check_coverage(const AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  std::vector<std::vector<int64_t>> first_cell;  // of tokens x heads
  int64_t cells = 0;
  for (const AttentionSegment& segment : batch.segments) {
    first_cell.push_back({cells});
    cells += segment.q_len * batch.shape.num_heads;
  }
  std::vector<std::vector<std::pair<int64_t, int64_t>>> keys(cells);
  for (const AttentionItem& item : plan.items) {
    FUZZ_CHECK(visible_pairs(batch, item) == pairs_by_hand(batch, item));
    for (int64_t t = 0; t < item.num_tokens; ++t) {
      for (int64_t h = 0; h < item.num_heads; ++h) {
        const int64_t cell = first_cell[item.segment][0] +
                             (item.first_token + t) * batch.shape.num_heads + item.first_head + h;
        keys[cell].emplace_back(item.kv_begin, item.kv_end);
      }
    }
  }
  int64_t cell = 0;
  for (const AttentionSegment& segment : batch.segments) {
    for (int64_t i = 0; i < segment.q_len * batch.shape.num_heads; ++i, ++cell) {
      const int64_t token = i / batch.shape.num_heads;
      const int64_t position = segment.first_position + token * segment.position_step;
      const int64_t begin = std::max<int64_t>(0, position - segment.left);
      const int64_t end = std::min(segment.kv_len, position + segment.right + 1);
      auto& ranges = keys[cell];
      FUZZ_CHECK(!ranges.empty());
      std::sort(ranges.begin(), ranges.end());
      if (begin < end) FUZZ_CHECK(ranges.front().first <= begin && ranges.back().second >= end);
      for (std::size_t k = 1; k < ranges.size(); ++k) {
        FUZZ_CHECK(ranges[k].first == ranges[k - 1].second);
      }
    }
  }
}

void check_plan(const AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  FUZZ_CHECK(plan.items.size() == plan.item_costs.size());
  FUZZ_CHECK(plan.part_keys >= 1);
  FUZZ_CHECK(batch.pages.num_rows() == std::ssize(batch.segments));
  for (const int32_t page : batch.pages.page_ids) FUZZ_CHECK(page >= 0 && page < batch.num_pages);
  for (std::size_t s = 0; s < batch.segments.size(); ++s) {
    const AttentionSegment& segment = batch.segments[s];
    const int64_t pages = batch.pages.indptr[s + 1] - batch.pages.indptr[s];
    FUZZ_CHECK(pages * batch.page_size >= segment.kv_len);
    FUZZ_CHECK(segment.q_begin >= 0 && segment.q_begin + segment.q_len <= batch.num_rows);
  }
  std::vector<int64_t> parts(plan.splits.size(), 0);
  for (const AttentionItem& item : plan.items) {
    FUZZ_CHECK(item.segment >= 0 && item.segment < std::ssize(batch.segments));
    const AttentionSegment& segment = batch.segments[item.segment];
    FUZZ_CHECK(item.num_heads >= 1 && item.first_head >= 0);
    FUZZ_CHECK(item.first_head + item.num_heads <= batch.shape.num_heads);
    FUZZ_CHECK(item.num_tokens >= 1 && item.first_token >= 0);
    FUZZ_CHECK(item.first_token + item.num_tokens <= segment.q_len);
    FUZZ_CHECK(0 <= item.kv_begin && item.kv_begin <= item.kv_end);
    FUZZ_CHECK(item.kv_end <= segment.kv_len);
    if (item.split < 0) continue;
    FUZZ_CHECK(item.split < std::ssize(plan.splits));
    const AttentionSplit& split = plan.splits[item.split];
    ++parts[item.split];
    FUZZ_CHECK(split.rows == item.num_tokens * item.num_heads);
    FUZZ_CHECK((item.kv_begin - split.first_key) % plan.part_keys == 0);
    FUZZ_CHECK(split.first_row + int64_t{split.rows} * split.num_parts <= plan.partial_rows);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) FUZZ_CHECK(parts[i] == plan.splits[i].num_parts);
  const int64_t partial_bytes =
      plan.partial_rows * (batch.shape.v_head_dim + kPartialStateFloats) * int64_t{4};
  FUZZ_CHECK(partial_bytes <= kMaxPartialBytes);
}

bool is_close(double value, double expected, double tolerance) {
  if (std::isinf(expected)) return value == expected;
  return std::abs(value - expected) <= tolerance * (1 + std::abs(expected));
}

void check_results(Reader& in, const Input& input, const AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  const auto [heads, kv_heads, head_dim, v_head_dim] = batch.shape;
  const DType dtype = in.one_of({DType::float32, DType::bfloat16, DType::float16});
  const bool hnd = in.flag();
  const auto cache = [&](int64_t dim) {
    const int64_t shape[] = {
        batch.num_pages, hnd ? kv_heads : batch.page_size, hnd ? batch.page_size : kv_heads, dim
    };
    return Tensor(dtype, shape, &in, 8);
  };
  Tensor q(dtype, std::vector<int64_t>{batch.num_rows, heads, head_dim}, &in, 8);
  Tensor k = cache(head_dim), v = cache(v_head_dim);
  const Ints out_shape = {batch.num_rows, heads, v_head_dim}, lse_shape = {batch.num_rows, heads};
  Tensor out(dtype, out_shape, &in, 8), lse(DType::float32, lse_shape);
  const uint64_t seed = in.bits(2);
  q.fill(seed);
  k.fill(seed + 1);
  v.fill(seed + 2);
  const KVAxisOrder layout = hnd ? KVAxisOrder::hnd : KVAxisOrder::nhd;
  AttentionArguments arguments = {
      .function = "fuzz",
      .q = q.view(),
      .k = paged_cache("fuzz", "k", k.view(), layout, batch.page_size),
      .v = paged_cache("fuzz", "v", v.view(), layout, batch.page_size),
      .q_rope = std::nullopt,
      .k_rope = std::nullopt,
      .scale = 0.25,
      .softcap = in.rarely(4) ? 2.0 : 0.0,
      .sinks = std::nullopt,
      .out = out.view(),
      .lse = lse.view(),
  };
  run_attention(plan, arguments);

  Tensor expected(DType::float64, out_shape), expected_lse(DType::float64, lse_shape);
  reference::PagedAttention oracle = {
      .q = q.view(),
      .k_cache = k.view(),
      .v_cache = v.view(),
      .hnd = hnd,
      .page_size = batch.page_size,
      .q_lens = input.batch.q_lens,
      .kv_lens = {},
      .first_positions = input.batch.first_positions,
      .block_tables = {},
      .scale = arguments.scale,
      .causal = input.batch.visibility.causal,
      .causal_of_each = input.batch.visibility.causal_of_each,
      .window = input.batch.visibility.window,
      .custom_mask = input.batch.visibility.custom_mask,
      .softcap = arguments.softcap,
      .sinks = std::nullopt,
  };
  int64_t columns = 0;
  for (std::size_t s = 0; s < batch.segments.size(); ++s) {
    oracle.kv_lens.push_back(batch.segments[s].kv_len);
    columns = std::max(columns, batch.pages.indptr[s + 1] - batch.pages.indptr[s]);
  }
  std::vector<int32_t> table(batch.segments.size() * columns, 0);
  for (std::size_t s = 0; s < batch.segments.size(); ++s) {
    std::copy(
        batch.pages.page_ids.begin() + batch.pages.indptr[s],
        batch.pages.page_ids.begin() + batch.pages.indptr[s + 1], table.begin() + s * columns
    );
  }
  oracle.block_tables = {
      .data = table.data(),
      .rows = std::ssize(batch.segments),
      .columns = columns,
      .row_stride = columns
  };
  reference::paged_attention(oracle, expected.view(), expected_lse.view());
  const double tolerance = dtype == DType::float32 ? 1e-4 : 0.02;
  for (int64_t row = 0; row < batch.num_rows * heads; ++row) {
    const int64_t token = row / heads, head = row % heads;
    const int64_t begin = token * out.view().strides[0] + head * out.view().strides[1];
    FUZZ_CHECK(is_close(lse.as<float>()[row], expected_lse.as<double>()[row], 1e-3));
    for (int64_t d = 0; d < v_head_dim; ++d) {
      const double value = number_at(out.view(), begin + d);
      FUZZ_CHECK(is_close(value, expected.as<double>()[row * v_head_dim + d], tolerance));
    }
  }
}

}  // namespace

void run(Reader in) {
  const Input input = read_input(in);
  if (is_heavy(input.batch)) return;
  const auto plan =
      accepted([&] { return plan_sequences("fuzz", input.batch, /*num_threads=*/1); });
  if (!plan) return;
  check_plan(*plan);
  const AttentionBatch& batch = plan->batch;
  const int64_t rows = batch.num_rows * batch.shape.num_heads;
  int64_t keys = 0;
  for (const AttentionSegment& segment : batch.segments) keys += segment.kv_len;
  if (rows > kMaxChecked) return;
  check_coverage(*plan);
  const int64_t head_dim = std::max(batch.shape.head_dim, batch.shape.v_head_dim);
  const int64_t slots = batch.num_pages <= 64 && batch.page_size <= 64
                            ? batch.num_pages * batch.page_size
                            : kMaxCache;
  if (rows * (keys + 1) * head_dim > kMaxProducts) return;
  if (slots * batch.shape.num_kv_heads * head_dim > kMaxCache) return;
  if (in.rarely(4)) check_results(in, input, *plan);
}

}  // namespace cpattn::fuzz
