// SPDX-License-Identifier: Apache-2.0
#include "cpattn/indexer.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "cpattn/check.h"
#include "cpattn/parallel.h"
#include "cpattn/trace.h"
#include "ops/kernel_table.h"

namespace cpattn {
namespace {

/// Queries that share packed keys: packing costs as much as scores of a sixth of one.
constexpr int64_t kItemQueries = 32;

kernels::IndexerType indexer_type(const char* function, DType dtype) {
  switch (dtype) {
    case DType::float32:
      return kernels::kIndexFloat32;
    case DType::bfloat16:
      return kernels::kIndexBfloat16;
    case DType::float8_e4m3fn:
      return kernels::kIndexFloat8;
    case DType::int8:
      return kernels::kIndexInt8;
    default:
      check(
          false, function, ": keys must be bfloat16, float32, float8_e4m3fn or int8, got ", dtype
      );
      __builtin_unreachable();
  }
}

void check_weights(const IndexerArguments& arguments) {
  const TensorView& weights = arguments.weights;
  const TensorView& q = arguments.q;
  check(
      weights.dtype == DType::float32 || weights.dtype == DType::bfloat16, arguments.function,
      ": weights must be float32 or bfloat16, got ", weights.dtype
  );
  const bool one = weights.rank == 3 && weights.shape[2] == 1;
  check(
      (weights.rank == 2 || one) && weights.shape[0] == q.shape[0] &&
          weights.shape[1] == q.shape[1],
      arguments.function, ": weights must have shape [", q.shape[0], ", ", q.shape[1],
      "] or that and 1, got ", ShapeOf{weights}
  );
}

void check_arguments(const IndexerArguments& arguments) {
  const char* function = arguments.function;
  const TensorView& q = arguments.q;
  const IndexKeys& keys = arguments.keys;
  indexer_type(function, keys.dtype);
  check_tensor(function, "q", q, 3);
  check(q.dtype == keys.dtype, function, ": q must be ", keys.dtype, " as the keys, got ", q.dtype);
  check(q.shape[1] >= 1, function, ": q must have at least one head, got ", ShapeOf{q});
  check(
      q.shape[2] == keys.dim, function, ": q must have the dimension of the keys (", keys.dim,
      "), got ", q.shape[2]
  );
  const int64_t multiple = keys.dtype == DType::float8_e4m3fn ? 32 : 16;
  check(
      keys.dim >= multiple && keys.dim % multiple == 0 && keys.dim <= kernels::kMaxIndexerDim,
      function, ": the dimension of ", keys.dtype, " keys must be a multiple of ", multiple,
      " up to ", kernels::kMaxIndexerDim, ", got ", keys.dim
  );
  check_weights(arguments);
  for (const IndexerRow& row : arguments.rows) {
    check(
        row.query >= 0 && row.query < q.shape[0], function, ": q has ", q.shape[0],
        " rows, none is ", row.query
    );
    if (row.begin >= row.end) continue;
    check(
        row.table_row >= 0 && row.table_row < arguments.pages.num_rows(), function,
        ": the page table has ", arguments.pages.num_rows(), " rows, none is ", row.table_row
    );
    const auto* indptr = arguments.pages.indptr.data() + row.table_row;
    check(
        row.begin >= 0 && row.end <= (indptr[1] - indptr[0]) * keys.page_size, function, ": keys [",
        row.begin, ", ", row.end, ") of query ", row.query, " are not in the ",
        indptr[1] - indptr[0], " pages of row ", row.table_row
    );
  }
}

void check_result(
    const IndexerArguments& arguments,
    const char* name,
    const TensorView& result,
    DType dtype,
    int64_t columns
) {
  const char* function = arguments.function;
  check(result.dtype == dtype, function, ": ", name, " must be ", dtype, ", got ", result.dtype);
  check_tensor(function, name, result, 2);
  check(
      result.shape[0] == arguments.q.shape[0] && result.shape[1] == columns, function, ": ", name,
      " must have shape [", arguments.q.shape[0], ", ", columns, "], got ", ShapeOf{result}
  );
}

float weight_at(const TensorView& weights, int64_t query, int64_t head) {
  const int64_t offset = query * weights.strides[0] + head * weights.strides[1];
  if (weights.dtype == DType::float32) return weights.as<float>()[offset];
  return std::bit_cast<float>(uint32_t{weights.as<uint16_t>()[offset]} << 16);
}

/// Rows [begin, begin + count) of the arguments, which read the same sequence.
struct Item {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t cost = 0;
};

/// Most expensive first, so that threads end at the same time.
std::vector<Item> make_items(std::span<const IndexerRow> rows) {
  std::vector<Item> items;
  for (int64_t i = 0; i < std::ssize(rows); ++i) {
    if (items.empty() || items.back().count == kItemQueries ||
        rows[items.back().begin].table_row != rows[i].table_row) {
      items.push_back({.begin = i});
    }
    ++items.back().count;
    items.back().cost += std::max<int64_t>(0, rows[i].end - rows[i].begin);
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return a.cost > b.cost;
  });
  return items;
}

bool stop_requested(void* token) { return static_cast<StopToken*>(token)->should_stop(); }

/// The queries of one item as its kernel takes them.
class ItemQueries {
 public:
  ItemQueries(const IndexerArguments& arguments, const Item& item) : arguments_(arguments) {
    const TensorView& q = arguments.q;
    weights_.resize(item.count * q.shape[1]);
    float* weights = weights_.data();
    for (int64_t i = item.begin; i < item.begin + item.count; ++i) {
      const IndexerRow& row = arguments.rows[i];
      for (int64_t head = 0; head < q.shape[1]; ++head) {
        weights[head] = weight_at(arguments.weights, row.query, head);
      }
      queries.push_back({
          .q = q.as<char>() + row.query * q.strides[0] * element_size(q.dtype),
          .weights = weights,
          .begin = row.begin,
          .end = std::max(row.begin, row.end),
          .origin = row.begin,
      });
      weights += q.shape[1];
    }
    table_row_ = arguments.rows[item.begin].table_row;
  }

  kernels::IndexerTile tile(StopToken& stop) const {
    const IndexKeys& keys = arguments_.keys;
    const PageTable& pages = arguments_.pages;
    return {
        .queries = queries.data(),
        .num_queries = static_cast<int32_t>(queries.size()),
        .num_heads = narrow_to_int32(arguments_.q.shape[1], arguments_.function),
        .dim = static_cast<int32_t>(keys.dim),
        .head_stride = arguments_.q.strides[1],
        .keys =
            {
                .data = keys.data,
                .page_bytes = keys.page_bytes,
                .row_bytes = keys.row_bytes,
                .scales = keys.scales,
                .scale_page_bytes = keys.scale_page_bytes,
                .scale_row_bytes = keys.scale_row_bytes,
                .pages = pages.page_ids.data() + pages.indptr[table_row_],
                .page_size = keys.page_size,
            },
        .should_stop = &stop_requested,
        .stop_context = &stop,
    };
  }

  std::vector<kernels::IndexerQuery> queries;

 private:
  const IndexerArguments& arguments_;
  std::vector<float> weights_;
  int64_t table_row_ = 0;
};

/// Calls function(item's index) for all items on the threads of the call.
int threads_of(const IndexerArguments& arguments) {
  return arguments.num_threads > 0 ? arguments.num_threads : default_num_threads();
}

void run_tile(const kernels::IndexerKernel& kernel, const kernels::IndexerTile& tile) {
  const auto bytes = kernel.scratch_bytes(tile.num_queries, tile.num_heads, tile.dim, tile.topk);
  kernel.run(&tile, thread_scratch(static_cast<std::size_t>(bytes)));
}

/// The rows of the result that no query of the arguments has.
std::vector<int64_t> other_rows(const IndexerArguments& arguments) {
  std::vector<bool> asked(arguments.q.shape[0]);
  for (const IndexerRow& row : arguments.rows) asked[row.query] = true;
  std::vector<int64_t> others;
  for (int64_t i = 0; i < std::ssize(asked); ++i) {
    if (!asked[i]) others.push_back(i);
  }
  return others;
}

const kernels::IndexerKernel& kernel_of(const IndexerArguments& arguments) {
  return active_sparse_kernels()
      .indexer.of_type[indexer_type(arguments.function, arguments.keys.dtype)];
}

template <class T>
T* row_of(const TensorView& tensor, int64_t row) {
  return tensor.as<T>() + row * tensor.strides[0];
}

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

}  // namespace

IndexKeys flat_index_keys(
    const char* function, const TensorView& k, const std::optional<TensorView>& scales
) {
  check_tensor(function, "k", k, 2);
  const int64_t bytes = element_size(k.dtype);
  IndexKeys keys{
      .data = k.data,
      .dtype = k.dtype,
      .dim = k.shape[1],
      .num_pages = 1,
      .page_size = std::max<int64_t>(1, k.shape[0]),
      .row_bytes = k.strides[0] * bytes,
  };
  if (!scales) return keys;
  check(
      scales->dtype == DType::float32, function, ": k_scale must be float32, got ", scales->dtype
  );
  const bool one = scales->rank == 2 && scales->shape[1] == 1;
  check(
      (scales->rank == 1 || one) && scales->shape[0] == k.shape[0], function,
      ": k_scale must have shape [", k.shape[0], "] or [", k.shape[0], ", 1], got ",
      ShapeOf{*scales}
  );
  keys.scales = scales->data;
  keys.scale_row_bytes = scales->strides[0] * element_size(scales->dtype);
  return keys;
}

std::vector<IndexerRow> flat_indexer_rows(
    const char* function,
    std::span<const int64_t> ks,
    std::span<const int64_t> ke,
    int64_t num_queries,
    int64_t num_keys
) {
  check(
      std::ssize(ks) == num_queries && std::ssize(ke) == num_queries, function,
      ": ks and ke must have one entry for each of ", num_queries, " queries, got ", ks.size(),
      " and ", ke.size()
  );
  std::vector<IndexerRow> rows(ks.size());
  for (int64_t i = 0; i < num_queries; ++i) {
    check(ks[i] >= 0, function, ": ks must be >= 0, got ", ks[i], " at index ", i);
    check(
        ke[i] <= num_keys, function, ": ke must be at most the number of keys (", num_keys,
        "), got ", ke[i], " at index ", i
    );
    rows[i] = {.query = i, .begin = ks[i], .end = ke[i]};
  }
  return rows;
}

void indexer_logits(const IndexerArguments& arguments, const TensorView& logits) {
  check_arguments(arguments);
  check_tensor(arguments.function, "logits", logits, 2);
  const int64_t columns = logits.shape[1];
  check_result(arguments, "logits", logits, DType::float32, columns);
  const auto row_of_logits = [&](int64_t query) { return row_of<float>(logits, query); };
  for (const IndexerRow& row : arguments.rows) {
    check(
        row.begin >= row.end || row.end <= columns, arguments.function, ": logits have ", columns,
        " columns, too few for keys [", row.begin, ", ", row.end, ") of query ", row.query
    );
  }
  const TraceSpan call(TraceScope::call, 0, arguments.keys.dtype, arguments.function);
  for (int64_t query : other_rows(arguments)) std::fill_n(row_of_logits(query), columns, kNoScore);
  const std::vector<Item> items = make_items(arguments.rows);
  const auto& kernel = kernel_of(arguments);
  parallel_for(std::ssize(items), threads_of(arguments), [&](int64_t index, StopToken& stop) {
    const TraceSpan span(TraceScope::item);
    ItemQueries item(arguments, items[index]);
    for (int64_t i = 0; i < items[index].count; ++i) {
      const int64_t query = arguments.rows[items[index].begin + i].query;
      kernels::IndexerQuery& asked = item.queries[i];
      float* row = row_of_logits(query);
      const int64_t first = std::min(asked.begin, columns);
      asked.logits = row + first;
      std::fill(row, row + first, kNoScore);
      std::fill(row + first + (asked.end - asked.begin), row + columns, kNoScore);
    }
    run_tile(kernel, item.tile(stop));
  });
}

void indexer_topk(const IndexerArguments& arguments, const IndexerTopk& topk) {
  const char* function = arguments.function;
  check_arguments(arguments);
  check(topk.topk >= 1, function, ": topk must be >= 1, got ", topk.topk);
  const int32_t k = narrow_to_int32(topk.topk, function);
  check_result(arguments, "indices", topk.indices, DType::int32, k);
  if (topk.values) check_result(arguments, "values", *topk.values, DType::float32, k);
  for (const IndexerRow& row : arguments.rows) narrow_to_int32(row.end - row.begin, function);
  const TraceSpan call(TraceScope::call, 0, arguments.keys.dtype, function);
  const auto indices_of = [&](int64_t query) { return row_of<int32_t>(topk.indices, query); };
  const auto values_of = [&](int64_t query) {
    return topk.values ? row_of<float>(*topk.values, query) : nullptr;
  };
  for (int64_t query : other_rows(arguments)) {
    std::fill_n(indices_of(query), k, -1);
    if (topk.values) std::fill_n(values_of(query), k, kNoScore);
  }
  const std::vector<Item> items = make_items(arguments.rows);
  const auto& kernel = kernel_of(arguments);
  parallel_for(std::ssize(items), threads_of(arguments), [&](int64_t index, StopToken& stop) {
    const TraceSpan span(TraceScope::item);
    ItemQueries item(arguments, items[index]);
    for (int64_t i = 0; i < items[index].count; ++i) {
      const int64_t query = arguments.rows[items[index].begin + i].query;
      item.queries[i].indices = indices_of(query);
      item.queries[i].values = values_of(query);
    }
    kernels::IndexerTile tile = item.tile(stop);
    tile.topk = k;
    tile.sorted = topk.sorted;
    run_tile(kernel, tile);
  });
}

}  // namespace cpattn
