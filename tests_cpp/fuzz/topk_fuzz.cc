// SPDX-License-Identifier: Apache-2.0
// Top-k selection and its transforms, against a sort and plain lookups.
#include "cpattn/sparse/topk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "cpattn/sparse/dcp_local_indices.h"
#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;
using Indices = std::vector<std::vector<int32_t>>;

struct Input {
  int64_t rows = 0, columns = 0, topk = 1;
  bool sorted = true;
  Ints lengths;
  std::optional<Ints> row_starts;
  std::vector<Tensor> score;
  TopkArguments arguments;
};

float read_score(Reader& in) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kScores[] = {0, -0.0f, 1, -1, 0.5f, kInf, -kInf, NAN, -NAN, 1e-45f, 3e38f, 2, 3};
  if (!in.rarely(4)) return in.one_of(kScores);
  const auto bits = static_cast<uint32_t>(in.bits(4));
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void read_input(Reader& in, Input& input) {
  input.rows = in.between(0, 4);
  input.columns = in.rarely(8) ? in.between(0, 80) : in.between(0, 12);
  input.topk = in.mostly(in.between(1, 8));
  input.sorted = in.flag();
  Tensor& score = input.score.emplace_back(DType::float32, Ints{input.rows, input.columns}, &in, 3);
  for (float& value : score.as<float>()) value = read_score(in);
  if (in.rarely(4)) {
    input.row_starts = in.list(in.size_near(input.rows), [&] {
      return in.mostly(in.between(0, std::max<int64_t>(input.columns / 2, 1)), 128);
    });
  }
  for (int64_t i = in.size_near(input.rows); i > 0; --i) {
    input.lengths.push_back(
        in.mostly(in.between(-1, input.row_starts ? (input.columns + 1) / 2 : input.columns), 128)
    );
  }
  input.arguments = {
      .function = "fuzz",
      .score = score.view(),
      .lengths = input.lengths,
      .row_starts = std::nullopt,
      .topk = input.topk,
      .sorted = input.sorted,
  };
  if (input.row_starts) input.arguments.row_starts = *input.row_starts;
}

/// What fast_topk has to give for a row of accepted arguments.
std::vector<int32_t> expected_row(const Input& input, int64_t row) {
  const int64_t length = std::max<int64_t>(input.lengths[row], 0);
  const int64_t start = input.row_starts ? (*input.row_starts)[row] : 0;
  const TensorView& score = input.arguments.score;
  const float* from = score.as<float>() + row * score.strides[0] + start;
  std::vector<int32_t> order(length);
  std::iota(order.begin(), order.end(), 0);
  if (length > input.topk) {
    const auto rank = [from](int32_t i) {
      return std::isnan(from[i]) ? -std::numeric_limits<float>::infinity() : from[i];
    };
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return rank(a) != rank(b) ? rank(a) > rank(b) : a < b;
    });
    order.resize(input.topk);
    if (!input.sorted) std::sort(order.begin(), order.end());
  }
  order.resize(input.topk, -1);
  return order;
}

std::vector<int32_t> row_of(const TensorView& tensor, int64_t row) {
  const int32_t* from = tensor.as<int32_t>() + row * tensor.strides[0];
  return {from, from + tensor.shape[1]};
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

/// A tensor of results, sometimes of another shape.
Tensor result_of(Reader& in, int64_t rows, int64_t columns) {
  const bool is_small = columns >= 0 && columns <= 256;
  return {DType::int32, Ints{in.size_near(rows), in.size_near(is_small ? columns : 1)}, &in, 3};
}

int32_t slot_of(const IndexTable& table, int64_t row, int64_t token, int64_t page_size) {
  const int64_t slot = table.at(row, token / page_size) * page_size + token % page_size;
  FUZZ_CHECK(slot >= 0 && slot <= INT32_MAX);
  return static_cast<int32_t>(slot);
}

struct Slots {
  Table pages;
  std::optional<Ints> cu_seqlens_q, batch_idx_list;
  TopkSlots slots;

  Slots(Reader& in, int64_t rows, int64_t columns)
      : pages(in, in.size_near(rows), in.size_near(columns), [&in] {
          return in.mostly(in.between(0, 20), 256);
        }) {}
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
};

void check_transforms(Reader& in, const Input& input, const Indices& expected) {
  const int64_t page_size = in.mostly(in.between(1, 4), 64);
  const int64_t width = input.columns / std::max<int64_t>(page_size, 1) + 1;
  Slots table(in, input.rows, std::min<int64_t>(width, 100));
  table.slots.table = {.pages = table.pages.view(), .page_size = page_size};
  const int64_t height = table.slots.table.pages.rows;
  Ints row_of_query(input.rows);
  std::iota(row_of_query.begin(), row_of_query.end(), 0);
  if (in.rarely(4)) {
    table.batch_idx_list = in.list(in.size_near(input.rows), [&] {
      return in.mostly(in.between(0, std::max<int64_t>(height - 1, 0)), 128);
    });
    table.slots.batch_idx_list = *table.batch_idx_list;
  }
  if (in.rarely(4)) {
    const int64_t n = table.batch_idx_list ? std::ssize(*table.batch_idx_list) : height;
    Ints sums = {in.mostly(0)};
    for (int64_t i = 1; i <= n; ++i) {
      sums.push_back(i == n ? in.mostly(input.rows) : in.between(sums.back(), input.rows + 1));
    }
    table.cu_seqlens_q = std::move(sums);
    table.slots.cu_seqlens_q = *table.cu_seqlens_q;
  }
  Tensor out = result_of(in, input.rows, input.topk);
  const bool paged = runs([&] {
    topk_transform(
        input.arguments, TopkTransformMethod::paged, table.slots, std::nullopt, out.view()
    );
  });
  for (int64_t i = 0; paged && i < input.rows; ++i) {
    int64_t sequence = i;
    if (table.cu_seqlens_q) {
      const Ints& sums = *table.cu_seqlens_q;
      sequence = std::upper_bound(sums.begin(), sums.end(), i) - sums.begin() - 1;
    }
    const int64_t row = table.batch_idx_list ? table.batch_idx_list->at(sequence) : sequence;
    std::vector<int32_t> slots = expected[i];
    for (int32_t& index : slots) {
      if (index >= 0) index = slot_of(table.slots.table.pages, row, index, page_size);
    }
    FUZZ_CHECK(row_of(out.view(), i) == slots);
  }
  const Ints offsets =
      in.list(in.size_near(input.rows), [&] { return in.mostly(in.between(0, 100), 128); });
  const bool ragged = runs([&] {
    topk_transform(input.arguments, TopkTransformMethod::ragged, std::nullopt, offsets, out.view());
  });
  for (int64_t i = 0; ragged && i < input.rows; ++i) {
    std::vector<int32_t> rows = expected[i];
    for (int32_t& index : rows) {
      if (index >= 0) index += static_cast<int32_t>(offsets[i]);
    }
    FUZZ_CHECK(row_of(out.view(), i) == rows);
  }
}

void check_selection(Reader& in) {
  Input input;
  read_input(in, input);
  Tensor out = result_of(in, input.rows, input.topk);
  const bool is_selected = runs([&] {
    topk_transform(input.arguments, std::nullopt, std::nullopt, std::nullopt, out.view());
  });
  Indices expected;
  for (int64_t i = 0; is_selected && i < input.rows; ++i) {
    expected.push_back(expected_row(input, i));
    FUZZ_CHECK(row_of(out.view(), i) == expected.back());
  }
  if (is_selected) check_transforms(in, input, expected);
}

void check_page_tables(Reader& in) {
  const int64_t rows = in.between(0, 4), columns = in.between(0, 5);
  const int64_t page_size = in.mostly(in.between(1, 4), 64);
  const int64_t height = in.rarely(4) ? in.between(0, 4) : rows;
  const Table pages(in, height, columns, [&] { return in.mostly(in.between(0, 20), 256); });
  const SlotTable table = {.pages = pages.view(), .page_size = page_size};
  const int64_t num_tokens = std::clamp<int64_t>(page_size, 1, 8) * columns;
  const Table tokens(in, rows, in.between(0, 6), [&] {
    return in.mostly(in.between(-1, std::max<int64_t>(num_tokens, 1) - 1), 256);
  });
  const IndexTable indices = tokens.view();
  Tensor out = result_of(in, rows, indices.columns);
  const auto check_rows = [&](const Ints& row_of_query) {
    for (int64_t i = 0; i < rows; ++i) {
      const std::vector<int32_t> slots = row_of(out.view(), i);
      for (int64_t j = 0; j < indices.columns; ++j) {
        const int64_t index = indices.at(i, j);
        const int64_t row = row_of_query.at(i);
        FUZZ_CHECK(slots.at(j) == (index < 0 ? -1 : slot_of(table.pages, row, index, page_size)));
      }
    }
  };
  if (runs([&] { transform_index_page_table_decode(table, indices, out.view()); })) {
    Ints row_of_query(rows);
    std::iota(row_of_query.begin(), row_of_query.end(), 0);
    check_rows(row_of_query);
  }
  Ints extend_lens;
  const int64_t num_lens = in.size_near(height);
  for (int64_t i = 0, left = rows; i < num_lens; ++i) {
    extend_lens.push_back(in.mostly(i + 1 == height ? left : in.between(0, left), 128));
    left = std::max<int64_t>(0, left - std::clamp<int64_t>(extend_lens.back(), 0, left));
  }
  if (runs([&] { transform_index_page_table_prefill(table, indices, extend_lens, out.view()); })) {
    Ints row_of_query;
    for (std::size_t s = 0; s < extend_lens.size(); ++s) {
      row_of_query.insert(row_of_query.end(), extend_lens[s], static_cast<int64_t>(s));
    }
    check_rows(row_of_query);
  }
  const Ints lengths =
      in.list(in.size_near(height), [&] { return in.mostly(in.between(0, num_tokens), 128); });
  if (!runs([&] { page_table_to_topk(table, lengths, out.view()); })) return;
  for (int64_t i = 0; i < out.view().shape[0]; ++i) {
    const std::vector<int32_t> slots = row_of(out.view(), i);
    for (int64_t j = 0; j < std::ssize(slots); ++j) {
      const bool is_token = i < std::ssize(lengths) && j < lengths[i];
      FUZZ_CHECK(slots[j] == (is_token ? slot_of(table.pages, i, j, page_size) : -1));
    }
  }
}

void check_local_indices(Reader& in) {
  const int64_t rows = in.between(0, 3), columns = in.between(0, 8);
  Tensor indices(DType::int32, Ints{rows, columns}, &in, 3);
  for (int32_t& index : indices.as<int32_t>()) {
    index = static_cast<int32_t>(in.mostly(in.between(-1, 40), 128));
  }
  const int64_t size = in.mostly(in.between(1, 4)), interleave = in.mostly(in.between(1, 5));
  const int64_t rank = in.mostly(in.between(0, std::clamp<int64_t>(size, 1, 8) - 1));
  Tensor local = result_of(in, rows, columns);
  if (!runs([&] { dcp_local_indices(indices.view(), rank, size, interleave, local.view()); })) {
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::vector<int32_t> expected;
    for (const int64_t index : row_of(indices.view(), i)) {
      if (index < 0 || index / interleave % size != rank) continue;
      const int64_t place = index / interleave / size * interleave + index % interleave;
      expected.push_back(static_cast<int32_t>(place));
    }
    expected.resize(columns, -1);
    FUZZ_CHECK(row_of(local.view(), i) == expected);
  }
}

void check_method(Reader& in) {
  constexpr const char* kNames[] = {
      "flashmla_sparse",
      "triton_sparse_mla",
      "flashmla_sparse_q8",
      "flashmla_kv",
      "fa3",
      "tilelang",
      "aiter",
      "trtllm",
      ""
  };
  std::string name = in.one_of(kNames);
  if (in.rarely(8)) name.push_back(static_cast<char>(in.bits(1)));
  std::optional<ForwardMode> mode;
  if (in.flag()) mode = static_cast<ForwardMode>(in.between(1, 9));
  const auto method = accepted([&] { return get_topk_transform_method(mode, in.flag(), name); });
  if (method && *method == TopkTransformMethod::ragged) FUZZ_CHECK(mode == ForwardMode::extend);
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {check_page_tables, check_local_indices, check_method,
                                          check_selection,   check_selection,     check_selection};
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
