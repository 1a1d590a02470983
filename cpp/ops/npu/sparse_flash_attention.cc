// SPDX-License-Identifier: Apache-2.0
#include "cpattn/npu/sparse_flash_attention.h"

#include <algorithm>
#include <cmath>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/base/parallel.h"
#include "ops/attention/selected_attention.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"
#include "ops/npu/token_sequences.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "npu_sparse_flash_attention";
constexpr CheckFor require{kFunction};

void check_modes(const SparseFlashArguments& arguments) {
  check_layouts(
      kFunction, arguments.layout_query, "layout_kv", arguments.layout_kv,
      arguments.block_table.has_value()
  );
  check_window(kFunction, arguments.sparse_mode, arguments.pre_tokens, arguments.next_tokens);
  require(
      arguments.sparse_block_size >= 1, "sparse_block_size must be >= 1, got ",
      arguments.sparse_block_size
  );
  require(
      arguments.attention_mode == 0 || arguments.attention_mode == 2,
      "attention_mode must be 0 or 2, got ", arguments.attention_mode
  );
  const bool rope = arguments.attention_mode == 2;
  require(
      arguments.query_rope.has_value() == rope && arguments.key_rope.has_value() == rope,
      "query_rope and key_rope must be given with attention_mode 2 and only with it, got mode ",
      arguments.attention_mode
  );
  check_scale(kFunction, "scale_value", arguments.scale_value);
}

/// A tensor with the axes of query except its heads and their dimension.
TensorView read_like_query(
    const SparseFlashArguments& arguments, const char* name, const TensorView& tensor, int64_t heads
) {
  check_tensor(kFunction, name, tensor, arguments.query.rank);
  const TensorView& query = arguments.query;
  const int last = query.rank - 1;
  require(
      std::equal(query.shape.begin(), query.shape.begin() + last - 1, tensor.shape.begin()) &&
          tensor.shape[last - 1] == heads,
      name, " must have the tokens of query ", ShapeOf{query}, " and ", heads, " heads, got ",
      ShapeOf{tensor}
  );
  return as_batch(tensor);
}

/// key, value or key_rope: one head of the tokens that key has.
kernels::PagedRows read_rows(
    const SparseFlashArguments& arguments, const char* name, const TensorView& tensor, int64_t dim
) {
  const TensorView& key = arguments.key;
  check_dtype(kFunction, name, tensor.dtype, arguments.query.dtype);
  check_tensor(kFunction, name, tensor, arguments.layout_kv == "TND" ? 3 : 4);
  require(
      std::equal(key.shape.begin(), key.shape.begin() + key.rank - 1, tensor.shape.begin()), name,
      " must have the tokens of key ", ShapeOf{key}, ", got ", ShapeOf{tensor}
  );
  const FlatRows rows = flat_rows(kFunction, name, tensor, dim);
  narrow_to_int32(rows.count, "npu_sparse_flash_attention: tokens of key");
  return {tensor.data, rows.stride, rows.stride};
}

/// Checks the tensors and reads them.
SelectedAttention read_tensors(const SparseFlashArguments& arguments) {
  const TensorView& query = arguments.query;
  element_type(kFunction, "query", query.dtype);
  check_tensor(kFunction, "query", query, arguments.layout_query == "TND" ? 3 : 4);
  const int last = query.rank - 1;
  const int64_t heads = query.shape[last - 1], dim = query.shape[last];
  SelectedAttention attention{.function = kFunction, .q = as_batch(query)};
  attention.scale = arguments.scale_value;
  attention.k =
      read_rows(arguments, "key", arguments.key, check_head_dim(kFunction, "D of query", dim));
  check_tensor(kFunction, "value", arguments.value, arguments.key.rank);
  attention.v_head_dim =
      check_head_dim(kFunction, "D of value", arguments.value.shape[arguments.value.rank - 1]);
  attention.v = read_rows(arguments, "value", arguments.value, attention.v_head_dim);
  if (arguments.query_rope) {
    check_dtype(kFunction, "query_rope", arguments.query_rope->dtype, query.dtype);
    attention.q_rope = read_like_query(arguments, "query_rope", *arguments.query_rope, heads);
    const int64_t rope_dim =
        check_head_dim(kFunction, "D of query_rope", attention.q_rope->shape[3]);
    check_head_parts(kFunction, dim, rope_dim);
    attention.k_rope = read_rows(arguments, "key_rope", *arguments.key_rope, rope_dim);
  }
  return attention;
}

/// The keys that the queries of a batch name.
class Selection {
 public:
  explicit Selection(const SparseFlashArguments& arguments)
      : indices_(read_like_query(arguments, "sparse_indices", arguments.sparse_indices, 1)),
        queries_(read_queries(arguments)),
        tokens_per_entry_(indices_.shape[1]),
        packed_(arguments.query.rank == 3),
        causal_(arguments.sparse_mode == 3) {
    require(
        indices_.dtype == DType::int32 || indices_.dtype == DType::int64,
        "sparse_indices must be int32 or int64, got ", indices_.dtype
    );
    read_keys(arguments);
    for (const int64_t len : keys_.lens) max_len_ = std::max(max_len_, len);
    block_ = std::min(arguments.sparse_block_size, std::max<int64_t>(1, max_len_));
  }

  int64_t max_keys() const { return indices_.shape[3] * std::min(block_, max_len_); }

  int64_t operator()(int64_t token, int32_t* rows) const {
    const int64_t sequence = sequence_of(token);
    if (sequence < 0) return 0;
    const int64_t i = token - queries_.begins[sequence];
    const int64_t kv_len = keys_.lens[sequence];
    const int64_t limit =
        causal_ ? std::min(kv_len, kv_len - queries_.lens[sequence] + i + 1) : kv_len;
    int64_t count = 0;
    for (int64_t j = 0; j < indices_.shape[3]; ++j) {
      const int64_t block = index(token, j);
      if (block < 0) break;
      if (block >= limit) continue;
      const int64_t begin = block * block_, end = std::min(begin + block_, limit);
      for (int64_t key = begin; key < end; ++key) rows[count++] = row_of(sequence, key);
    }
    return count;
  }

 private:
  static TokenSequences read_queries(const SparseFlashArguments& arguments) {
    constexpr char kName[] = "actual_seq_lengths_query";
    const auto& lengths = arguments.actual_seq_lengths_query;
    const auto& shape = arguments.query.shape;
    return arguments.query.rank == 3
               ? packed_sequences(kFunction, kName, lengths, shape[0])
               : padded_sequences(kFunction, kName, lengths, shape[0], shape[1]);
  }

  void read_keys(const SparseFlashArguments& arguments) {
    constexpr char kName[] = "actual_seq_lengths_kv";
    const auto& lengths = arguments.actual_seq_lengths_kv;
    const auto& shape = arguments.key.shape;
    if (arguments.layout_kv == "TND") {
      keys_ = packed_sequences(kFunction, kName, lengths, shape[0]);
      require(
          keys_.size() == queries_.size(), kName, " must have one entry per sequence (",
          queries_.size(), "), got ", keys_.size()
      );
      return;
    }
    page_size_ = shape[1];
    if (!arguments.block_table) {
      require(
          shape[0] == queries_.size(), "key must have the batch size of query, ", queries_.size(),
          ", got ", shape[0]
      );
      keys_ = padded_sequences(kFunction, kName, lengths, shape[0], page_size_);
      return;
    }
    require(lengths.has_value(), kName, " is mandatory with block_table");
    check_page_size(kFunction, page_size_);
    const int64_t limit = tokens_per_row(arguments.block_table->columns, page_size_);
    keys_ = padded_sequences(kFunction, kName, lengths, queries_.size(), limit);
    pages_ =
        page_table_from_blocks(kFunction, *arguments.block_table, keys_.lens, page_size_, shape[0]);
  }

  /// -1 for a row that belongs to none.
  int64_t sequence_of(int64_t token) const {
    int64_t sequence = tokens_per_entry_ == 0 ? 0 : token / tokens_per_entry_;
    if (packed_) {
      const auto& begins = queries_.begins;
      sequence = std::upper_bound(begins.begin(), begins.end(), token) - begins.begin() - 1;
    }
    if (sequence < 0) return -1;
    return token < queries_.begins[sequence] + queries_.lens[sequence] ? sequence : -1;
  }

  int64_t index(int64_t token, int64_t j) const {
    const int64_t offset = token / tokens_per_entry_ * indices_.strides[0] +
                           token % tokens_per_entry_ * indices_.strides[1] + j;
    return indices_.dtype == DType::int64 ? indices_.as<int64_t>()[offset]
                                          : indices_.as<int32_t>()[offset];
  }

  int32_t row_of(int64_t sequence, int64_t key) const {
    if (pages_.page_ids.empty()) return static_cast<int32_t>(keys_.begins[sequence] + key);
    const int64_t page = pages_.page_ids[pages_.indptr[sequence] + key / page_size_];
    return static_cast<int32_t>(page * page_size_ + key % page_size_);
  }

  TensorView indices_;  // [B, S1, 1, K]
  TokenSequences queries_, keys_;
  PageTable pages_;  // empty except for PA_BSND
  int64_t tokens_per_entry_;
  bool packed_, causal_;
  int64_t block_ = 1;  // keys of a block, at most those of the longest sequence
  int64_t page_size_ = 1;
  int64_t max_len_ = 0;
};

void check_out(const SparseFlashArguments& arguments, const SelectedAttention& attention) {
  check_dtype(kFunction, "out", arguments.out.dtype, arguments.query.dtype);
  read_like_query(arguments, "out", arguments.out, attention.q.shape[2]);
  require(
      arguments.out.shape[arguments.out.rank - 1] == attention.v_head_dim,
      "out must have the dimension of value, ", attention.v_head_dim, ", got ",
      ShapeOf{arguments.out}
  );
  const auto check_apart = [&](const char* name, const TensorView& result) {
    check_no_overlap(kFunction, name, result, "query", arguments.query);
    check_no_overlap(kFunction, name, result, "key", arguments.key);
    check_no_overlap(kFunction, name, result, "value", arguments.value);
    check_no_overlap(kFunction, name, result, "sparse_indices", arguments.sparse_indices);
    if (arguments.query_rope) {
      check_no_overlap(kFunction, name, result, "query_rope", *arguments.query_rope);
      check_no_overlap(kFunction, name, result, "key_rope", *arguments.key_rope);
    }
  };
  check_apart("out", arguments.out);
  const auto check_scalars = [&](const char* name, const TensorView& result) {
    check_apart(name, result);
    check_dtype(kFunction, name, result.dtype, DType::float32);
    require(
        result.is_contiguous() &&
            result.num_elements() * attention.q.shape[3] == attention.q.num_elements(),
        name, " must be contiguous, one for each token and head, got ", ShapeOf{result}
    );
  };
  require(
      arguments.softmax_max.has_value() == arguments.softmax_sum.has_value(),
      "softmax_max and softmax_sum must be given together"
  );
  if (!arguments.softmax_max) return;
  check_scalars("softmax_max", *arguments.softmax_max);
  check_scalars("softmax_sum", *arguments.softmax_sum);
  for (const auto& result : {*arguments.softmax_max, *arguments.softmax_sum}) {
    check_no_overlap(kFunction, "out", arguments.out, "softmax_max or softmax_sum", result);
  }
  check_no_overlap(
      kFunction, "softmax_max", *arguments.softmax_max, "softmax_sum", *arguments.softmax_sum
  );
}

}  // namespace

void npu_sparse_flash_attention(const SparseFlashArguments& arguments) {
  check_modes(arguments);
  SelectedAttention attention = read_tensors(arguments);
  const Selection selection(arguments);
  check_out(arguments, attention);
  attention.max_keys = selection.max_keys();
  attention.out = as_batch(arguments.out);
  if (arguments.softmax_max) {
    attention.max_logits = arguments.softmax_max->as<float>();
    attention.lse = arguments.softmax_sum->as<float>();
  }
  attend_selected(attention, selection, default_num_threads());
  if (!arguments.softmax_sum) return;
  for (int64_t i = 0; i < arguments.softmax_sum->num_elements(); ++i) {
    float& sum = attention.lse[i];
    sum = std::isinf(sum) ? 0 : std::exp(sum - attention.max_logits[i]);
  }
}

}  // namespace cpattn
