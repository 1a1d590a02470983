// SPDX-License-Identifier: Apache-2.0
#include "cpattn/npu/lightning_indexer.h"

#include <algorithm>
#include <span>

#include "cpattn/attention/attention_plan.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/sparse/indexer.h"
#include "ops/npu/token_sequences.h"
#include "ops/sparse/index_keys.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "npu_lightning_indexer";
constexpr CheckFor require{kFunction};

void check_batch(const char* name, const TokenSequences& sequences, int64_t batch) {
  require(
      sequences.size() == batch, name, " must have one entry per sequence (", batch, "), got ",
      sequences.size()
  );
}

void check_arguments(const LightningIndexerArguments& arguments) {
  check_layouts(
      kFunction, arguments.layout_query, "layout_key", arguments.layout_key,
      arguments.block_table.has_value()
  );
  check_window(kFunction, arguments.sparse_mode, arguments.pre_tokens, arguments.next_tokens);
  require(arguments.sparse_count >= 1, "sparse_count must be >= 1, got ", arguments.sparse_count);
  require(
      arguments.query.dtype == DType::bfloat16 || arguments.query.dtype == DType::float32,
      "query must be bfloat16 or float32, got ", arguments.query.dtype
  );
  require(
      arguments.key.dtype == arguments.query.dtype, "key must be ", arguments.query.dtype,
      " like query, got ", arguments.key.dtype
  );
}

/// Returns [B, S, ...] as [B * S, ...], and a tensor in a row of tokens as it is.
TensorView join_tokens(const char* name, const TensorView& tensor, bool packed) {
  if (packed) return tensor;
  require(
      tensor.shape[0] <= 1 || tensor.shape[1] <= 1 ||
          tensor.strides[0] == tensor.shape[1] * tensor.strides[1],
      name, " must have all its tokens one stride apart, got strides ", tensor.strides[0], " and ",
      tensor.strides[1], " for shape ", ShapeOf{tensor}
  );
  TensorView joined = tensor;
  joined.rank = tensor.rank - 1;
  joined.shape[0] = tensor.shape[0] * tensor.shape[1];
  joined.strides[0] = tensor.strides[tensor.shape[1] == 1 ? 0 : 1];
  for (int axis = 1; axis < joined.rank; ++axis) {
    joined.shape[axis] = tensor.shape[axis + 1];
    joined.strides[axis] = tensor.strides[axis + 1];
  }
  return joined;
}

/// The keys. Those of sequence b are in row b of the page table, from begins[b] on.
struct KeySequences {
  IndexKeys keys;
  PageTable pages;
  TokenSequences sequences;
};

IndexKeys keys_of(const LightningIndexerArguments& arguments, int64_t page_size) {
  const TensorView& key = arguments.key;
  const int64_t dim = arguments.query.shape[arguments.query.rank - 1];
  require(
      key.shape[key.rank - 2] == 1 && key.shape[key.rank - 1] == dim,
      "key must have tokens with 1 head of the D of query, ", dim, ", got shape ", ShapeOf{key}
  );
  TensorView pages = key;
  if (key.rank == 3) {  // all tokens in one page
    pages.rank = 4;
    pages.shape = {1, key.shape[0], 1, dim};
    pages.strides = {key.shape[0] * key.strides[0], key.strides[0], key.strides[1], 1};
  }
  if (pages.shape[1] == 0) {  // no page is read, wherever an empty tensor may be
    pages.shape[0] = 0;
    pages.shape[1] = page_size;
    pages.strides[3] = 1;  // which means nothing in an empty tensor
  }
  return view_index_keys(kFunction, pages, std::nullopt, page_size, dim);
}

KeySequences read_keys(const LightningIndexerArguments& arguments, int64_t batch) {
  constexpr char kName[] = "actual_seq_lengths_key";
  const TensorView& key = arguments.key;
  const SequenceLengths& lengths = arguments.actual_seq_lengths_key;
  const bool packed = arguments.layout_key == "TND";
  check_tensor(kFunction, "key", key, packed ? 3 : 4);
  const int64_t num_tokens = key.shape[packed ? 0 : 1];  // of a page
  const int64_t page_size = std::max<int64_t>(1, num_tokens);
  KeySequences result{.keys = keys_of(arguments, page_size)};
  if (arguments.block_table) {
    require(lengths.has_value(), kName, " is mandatory with block_table");
    require(num_tokens >= 1, "key must have blocks of tokens, got shape ", ShapeOf{key});
    check_page_size(kFunction, page_size);
    const int64_t limit = tokens_per_row(arguments.block_table->columns, page_size);
    result.sequences = padded_sequences(kFunction, kName, lengths, batch, limit);
    result.pages = page_table_from_blocks(
        kFunction, *arguments.block_table, result.sequences.lens, page_size, result.keys.num_pages
    );
  } else {
    require(
        packed || key.shape[0] == batch, "key must have the batch size of query, ", batch, ", got ",
        key.shape[0]
    );
    result.sequences = packed ? packed_sequences(kFunction, kName, lengths, num_tokens)
                              : padded_sequences(kFunction, kName, lengths, batch, num_tokens);
    check_batch(kName, result.sequences, batch);
    for (int64_t b = 0; b < batch; ++b) {
      result.pages.page_ids.push_back(packed ? 0 : narrow_to_int32(b, "the batch size of key"));
      result.pages.indptr.push_back(b + 1);
    }
  }
  if (!packed) std::fill(result.sequences.begins.begin(), result.sequences.begins.end(), 0);
  return result;
}

TokenSequences read_queries(const LightningIndexerArguments& arguments) {
  constexpr char kName[] = "actual_seq_lengths_query";
  const TensorView& query = arguments.query;
  const SequenceLengths& lengths = arguments.actual_seq_lengths_query;
  return query.rank == 3
             ? packed_sequences(kFunction, kName, lengths, query.shape[0])
             : padded_sequences(kFunction, kName, lengths, query.shape[0], query.shape[1]);
}

/// The row of the page table for each sequence. Engines make a sequence of every token; sequences
/// that read the same pages, or the first of these, share a row and are scored together.
std::vector<int64_t> shared_table_rows(const PageTable& pages) {
  const auto pages_of = [&](int64_t row) {
    return std::span(pages.page_ids)
        .subspan(pages.indptr[row], pages.indptr[row + 1] - pages.indptr[row]);
  };
  std::vector<int64_t> rows(pages.num_rows());
  for (int64_t b = pages.num_rows() - 1; b >= 0; --b) {
    rows[b] = b;
    if (b + 1 == pages.num_rows()) continue;
    const auto own = pages_of(b), next = pages_of(rows[b + 1]);
    if (own.size() <= next.size() && std::equal(own.begin(), own.end(), next.begin())) {
      rows[b] = rows[b + 1];
    }
  }
  return rows;
}

std::vector<IndexerRow> make_rows(
    const TokenSequences& queries, const KeySequences& key_sequences, bool causal
) {
  const TokenSequences& keys = key_sequences.sequences;
  const std::vector<int64_t> table_rows = shared_table_rows(key_sequences.pages);
  std::vector<IndexerRow> rows;
  for (int64_t b = 0; b < queries.size(); ++b) {
    for (int64_t i = 0; i < queries.lens[b]; ++i) {
      const int64_t visible = causal ? keys.lens[b] - queries.lens[b] + i + 1 : keys.lens[b];
      rows.push_back({
          .query = queries.begins[b] + i,
          .table_row = table_rows[b],
          .begin = keys.begins[b],
          .end = keys.begins[b] + std::max<int64_t>(visible, 0),
      });
    }
  }
  return rows;
}

/// A result with any axes, as a matrix.
TensorView as_matrix(const char* name, const TensorView& tensor, int64_t rows, int64_t columns) {
  int64_t elements = 0;
  require(
      !__builtin_mul_overflow(rows, columns, &elements) && tensor.is_contiguous() &&
          tensor.num_elements() == elements,
      name, " must be contiguous, ", rows, " rows of ", columns, ", got shape ", ShapeOf{tensor}
  );
  TensorView matrix = tensor;
  matrix.rank = 2;
  matrix.shape = {rows, columns};
  matrix.strides = {columns, 1};
  return matrix;
}

}  // namespace

void npu_lightning_indexer(const LightningIndexerArguments& arguments) {
  check_arguments(arguments);
  const bool packed = arguments.layout_query == "TND";
  check_tensor(kFunction, "query", arguments.query, packed ? 3 : 4);
  check_tensor(kFunction, "weights", arguments.weights, packed ? 2 : 3);
  const TensorView query = join_tokens("query", arguments.query, packed);
  const TokenSequences queries = read_queries(arguments);
  const KeySequences keys = read_keys(arguments, queries.size());
  const std::vector<IndexerRow> rows = make_rows(queries, keys, arguments.sparse_mode == 3);
  const IndexerArguments indexer{
      .function = kFunction,
      .q = query,
      .weights = join_tokens("weights", arguments.weights, packed),
      .keys = keys.keys,
      .pages = keys.pages,
      .rows = rows,
  };
  IndexerTopk result{
      .topk = arguments.sparse_count,
      .indices = as_matrix("indices", arguments.indices, query.shape[0], arguments.sparse_count),
  };
  if (arguments.values) {
    result.values = as_matrix("values", *arguments.values, query.shape[0], arguments.sparse_count);
  }
  indexer_topk(indexer, result);
}

}  // namespace cpattn
