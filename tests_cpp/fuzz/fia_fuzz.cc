// SPDX-License-Identifier: Apache-2.0
// The arguments of npu_fused_infer_attention_score: layouts, lengths, block tables and masks. What
// is accepted runs in memory of just the stated size.
#include "cpattn/npu/fia.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;

constexpr const char* kLayouts[] = {"BSH",       "BSND",      "BNSD", "BNSD_BSND", "BSH_NBSD",
                                    "BSND_NBSD", "BNSD_NBSD", "TND",  "TND_NTD",   "NTD_TND"};
constexpr int64_t kMaxElements = 1 << 14;

struct Input {
  FiaArguments arguments;
  std::deque<Tensor> tensors;
  std::deque<Table> tables;
  bool is_heavy = false;
};

struct Sizes {
  int64_t batch = 1, q_len = 1, kv_len = 1, num_heads = 1, num_kv_heads = 1, block_size = 1;
  int64_t num_blocks = 1, head_dim = 16, v_head_dim = 16, rope_dim = 16;
  DType dtype = DType::float32;
};

/// A tensor whose axes have, mostly, these names; of the shape that they say.
TensorView add_tensor(
    Reader& in,
    Input& input,
    std::string_view axes,
    const Sizes& sizes,
    int64_t len,
    int64_t heads,
    int64_t dim
) {
  Ints shape;
  int64_t elements = 1;
  for (const char axis : axes) {
    const int64_t size = axis == 'B'   ? sizes.batch
                         : axis == 'T' ? sizes.batch * len
                         : axis == 'S' ? len
                         : axis == 'N' ? heads
                         : axis == 'H' ? heads * dim
                                       : dim;
    shape.push_back(in.size_near(size));
    elements *= shape.back();
  }
  if (in.rarely(64)) shape.pop_back();
  if (elements > kMaxElements) {
    input.is_heavy = true;
    shape.assign(shape.size(), 1);
  }
  const DType dtype = in.rarely(64) ? DType::bfloat16 : sizes.dtype;
  return input.tensors.emplace_back(dtype, shape, &in, 8).view();
}

TensorView add_cache(
    Reader& in, Input& input, std::string_view axes, const Sizes& sizes, int64_t dim
) {
  if (!input.arguments.block_table) {
    return add_tensor(in, input, axes, sizes, sizes.kv_len, sizes.num_kv_heads, dim);
  }
  Sizes blocks = sizes;
  blocks.batch = sizes.num_blocks;
  const bool by_head = axes != "BSND" && axes != "BSH" && in.flag();
  return add_tensor(
      in, input, by_head ? "BNSD" : "BSH", blocks, sizes.block_size, sizes.num_kv_heads, dim
  );
}

Sizes read_sizes(Reader& in) {
  Sizes sizes;
  sizes.batch = in.between(0, 3);
  sizes.q_len = in.rarely(3) ? 1 : in.between(0, 4);
  sizes.kv_len = in.between(0, 9);
  sizes.num_kv_heads = in.between(1, 2);
  sizes.num_heads = sizes.num_kv_heads * in.between(1, 3);
  sizes.block_size = in.between(1, 4);
  sizes.num_blocks = in.between(1, 5);
  sizes.head_dim = in.one_of({16, 32});
  sizes.v_head_dim = in.one_of({16, 32});
  sizes.dtype = in.one_of({DType::float32, DType::bfloat16, DType::float16});
  return sizes;
}

/// Lengths of sequences, as running sums where the layout is packed.
Ints read_lengths(Reader& in, int64_t size, int64_t largest, bool packed) {
  Ints lengths;
  int64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t length = in.flag() ? largest : in.between(0, largest);
    sum += length;
    lengths.push_back(in.mostly(packed ? sum : length, 128));
  }
  if (packed && size > 0 && in.flag()) lengths.back() = size * largest;
  if (in.rarely()) lengths.resize(in.between(0, 4));
  return lengths;
}

void read_mask(Reader& in, Input& input, const Sizes& sizes) {
  constexpr int64_t kTemplate = 2048;
  FiaArguments& arguments = input.arguments;
  const bool is_template = arguments.sparse_mode >= 2 && !in.rarely();
  const DType dtype = in.one_of({DType::bool8, DType::int8, DType::uint8});
  Ints shape;
  const int64_t axes = in.between(0, 2);
  for (int64_t i = 0; i < axes; ++i) shape.push_back(i == 0 && in.flag() ? sizes.batch : 1);
  if (is_template) {
    // One row of memory stands for all: nobody reads the template.
    static Tensor row(DType::bool8, Ints{kTemplate});
    TensorView view = row.view();
    view.rank = static_cast<int>(shape.size()) + 2;
    view.shape = {1, 1, 1, 1};
    view.strides = {};
    view.shape[view.rank - 2] = in.mostly(kTemplate);
    view.shape[view.rank - 1] = kTemplate;
    view.strides[view.rank - 1] = 1;
    arguments.atten_mask = view;
    return;
  }
  const auto rounded = [&](int64_t side) { return in.rarely(4) ? (side + 15) / 16 * 16 : side; };
  shape.push_back(in.size_near(rounded(sizes.q_len)));
  shape.push_back(in.size_near(rounded(sizes.kv_len)));
  Tensor& mask = input.tensors.emplace_back(dtype, shape, &in, 8);
  mask.fill(in.bits(2));
  arguments.atten_mask = mask.view();
}

void read_input(Reader& in, Input& input) {
  Sizes sizes = read_sizes(in);
  FiaArguments& arguments = input.arguments;
  const std::string_view layout = in.one_of(kLayouts);
  arguments.input_layout = layout;
  const std::string_view axes = layout.substr(0, layout.find('_'));
  const bool packed = axes.find('T') != std::string_view::npos;
  const bool paged = in.flag();
  if (paged) {
    const int64_t columns = (sizes.kv_len + sizes.block_size - 1) / sizes.block_size;
    const int64_t rows = in.size_near(sizes.batch), width = in.size_near(columns);
    const auto block = [&] { return in.mostly(in.between(0, sizes.num_blocks - 1), 128); };
    arguments.block_table = input.tables.emplace_back(in, rows, width, block).view();
    if (in.rarely(64) && rows > 0 && width > 0) {  // broadcast along a row
      arguments.block_table->columns = std::max<int64_t>(in.any(), 1);
      arguments.block_table->column_stride = 0;
    }
    arguments.block_size = in.mostly(sizes.block_size);
  }
  arguments.num_heads = in.mostly(sizes.num_heads);
  arguments.num_key_value_heads =
      in.mostly(sizes.num_heads == sizes.num_kv_heads && in.flag() ? 0 : sizes.num_kv_heads);
  const auto query = [&](int64_t dim) {
    return add_tensor(in, input, axes, sizes, sizes.q_len, sizes.num_heads, dim);
  };
  arguments.query = query(sizes.head_dim);
  arguments.key = add_cache(in, input, axes, sizes, sizes.head_dim);
  arguments.value = add_cache(in, input, axes, sizes, sizes.v_head_dim);
  if (in.rarely(4)) {
    arguments.query_rope = query(sizes.rope_dim);
    if (!in.rarely()) arguments.key_rope = add_cache(in, input, axes, sizes, sizes.rope_dim);
  }
  if (packed || in.flag()) {
    const int64_t size = packed || in.flag() ? sizes.batch : 1;
    arguments.actual_seq_lengths = read_lengths(in, size, sizes.q_len, packed);
  }
  if (packed || paged || in.flag()) {
    arguments.actual_seq_lengths_kv = read_lengths(in, sizes.batch, sizes.kv_len, packed && !paged);
    // Keys beyond any memory, in pages that are there again and again.
    input.is_heavy |=
        paged && std::ranges::any_of(*arguments.actual_seq_lengths_kv, [](int64_t length) {
          return length > kMaxElements;
        });
  }
  arguments.scale = in.rarely(64) ? std::numeric_limits<double>::quiet_NaN() : 0.25;
  if (in.flag()) {
    arguments.sparse_mode = in.mostly(packed ? 3 : in.between(0, 4));
    if (!in.rarely()) read_mask(in, input, sizes);
    arguments.pre_tokens = in.mostly(in.between(0, 6) - 2, 4);
    arguments.next_tokens = in.mostly(in.between(0, 6) - 2, 4);
  }
  arguments.inner_precise = in.mostly(in.between(0, 3));
  arguments.softmax_lse_flag = in.flag();
  const uint64_t seed = in.bits(1);
  for (Tensor& tensor : input.tensors) tensor.fill(seed);
}

void check_plan(const AttentionPlan& plan) {
  const AttentionBatch& batch = plan.batch;
  for (const int32_t page : batch.pages.page_ids) FUZZ_CHECK(page >= 0 && page < batch.num_pages);
  for (const AttentionSegment& segment : batch.segments) {
    FUZZ_CHECK(segment.q_begin >= 0 && segment.q_len >= 0 && segment.kv_len >= 0);
    FUZZ_CHECK(segment.q_begin + segment.q_len <= batch.num_rows);
    const int64_t row = segment.table_row;
    FUZZ_CHECK(row >= 0 && row < batch.pages.num_rows());
    const int64_t pages = batch.pages.indptr[row + 1] - batch.pages.indptr[row];
    FUZZ_CHECK(pages * batch.page_size >= segment.kv_len);
  }
}

}  // namespace

void run(Reader in) {
  Input input;
  read_input(in, input);
  if (input.is_heavy) return;
  const auto plan = accepted([&] { return plan_fia(input.arguments); });
  if (!plan) return;
  for (const AttentionPlan& part : plan->plans) check_plan(part);
  Tensor out(input.arguments.query.dtype, plan->out_shape);
  Tensor lse(DType::float32, plan->lse_shape);
  const bool ran = accepted([&] {
                     run_fia(*plan, out.view(), lse.view());
                     return true;
                   }).has_value();
  if (!ran || plan->plans.empty()) return;
  // Weighted means of numbers between -2 and 2.
  for (int64_t i = 0; i < out.num_elements(); ++i) {
    FUZZ_CHECK(std::abs(number_at(out.view(), i)) <= 2.01);
  }
  for (const float value : lse.as<float>()) {
    FUZZ_CHECK(std::isfinite(value) || value == -std::numeric_limits<float>::infinity());
  }
}

}  // namespace cpattn::fuzz
