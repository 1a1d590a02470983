// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/indexer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"
#include "ops/sparse/indexer_arguments.h"
#include "ops/sparse/indexer_items.h"

namespace cpattn {
namespace {

constexpr float kNoScore = -std::numeric_limits<float>::infinity();

float weight_at(const TensorView& weights, int64_t query, int64_t head) {
  const int64_t offset = query * weights.strides[0] + head * weights.strides[1];
  if (weights.dtype == DType::float32) return weights.as<float>()[offset];
  return std::bit_cast<float>(uint32_t{weights.as<uint16_t>()[offset]} << 16);
}

bool stop_requested(void* token) { return static_cast<StopToken*>(token)->should_stop(); }

template <class T>
T* row_of(const TensorView& tensor, int64_t row) {
  return tensor.as<T>() + row * tensor.strides[0];
}

/// One call of the indexer: its rows that have keys, divided into items.
class Call {
 public:
  /// `topk` keys are selected of every row; 0 asks for its scores.
  Call(const IndexerArguments& arguments, int32_t topk)
      : arguments_(arguments),
        topk_(topk),
        threads_(arguments.num_threads > 0 ? arguments.num_threads : default_num_threads()) {
    const auto has_keys = [](const IndexerRow& row) { return row.begin < row.end; };
    std::ranges::copy_if(arguments.rows, std::back_inserter(rows_), has_keys);
    work_ = make_indexer_items(rows_, threads_, topk);
  }

  const IndexerItems& work() const { return work_; }
  const IndexerRow& row(const IndexerItem& item, int64_t i) const { return rows_[item.begin + i]; }
  int threads() const { return threads_; }
  const char* function() const { return arguments_.function; }

  /// The queries without keys.
  std::vector<int64_t> other_queries() const {
    std::vector<bool> asked(arguments_.q.shape[0]);
    for (const IndexerRow& row : rows_) asked[row.query] = true;
    std::vector<int64_t> others;
    for (int64_t i = 0; i < std::ssize(asked); ++i) {
      if (!asked[i]) others.push_back(i);
    }
    return others;
  }

  /// Runs the kernel on all items; direct(item, i, query) sets the destination of the results of
  /// row i of an item.
  template <class Direct>
  void run(bool sorted, Direct direct) const {
    const auto& kernel =
        active_sparse_kernels().indexer.of_type[indexer_type(arguments_.keys.dtype)];
    parallel_for(std::ssize(work_.items), threads_, [&](int64_t index, StopToken& stop) {
      const IndexerItem& item = work_.items[index];
      const TraceSpan span(TraceScope::item, flops(item), product_dtype());
      std::vector<float> weights;
      std::vector<kernels::IndexerQuery> queries = queries_of(item, weights);
      for (int64_t i = 0; i < item.count; ++i) direct(item, i, queries[i]);
      kernels::IndexerTile tile = tile_of(item, stop);
      tile.queries = queries.data();
      tile.topk = topk_;
      tile.sorted = sorted && item.num_parts == 1;
      const auto bytes =
          kernel.scratch_bytes(tile.num_queries, tile.num_heads, tile.dim, tile.topk);
      kernel.run(&tile, thread_scratch(arguments_.function, static_cast<std::size_t>(bytes)));
    });
  }

 private:
  /// `weights` keeps the weights of the queries alive.
  std::vector<kernels::IndexerQuery> queries_of(
      const IndexerItem& item, std::vector<float>& weights
  ) const {
    const TensorView& q = arguments_.q;
    weights.resize(item.count * q.shape[1]);
    std::vector<kernels::IndexerQuery> queries;
    float* next = weights.data();
    for (int64_t i = 0; i < item.count; ++i) {
      const IndexerRow& asked = row(item, i);
      const int64_t begin = std::clamp(item.first_key, asked.begin, asked.end);
      queries.push_back({
          .q = q.as<char>() + asked.query * q.strides[0] * element_size(q.dtype),
          .weights = next,
          .begin = begin,
          .end = std::clamp(item.end_key, begin, asked.end),
          .origin = asked.begin,
      });
      for (int64_t head = 0; head < q.shape[1]; ++head) {
        *next++ = weight_at(arguments_.weights, asked.query, head);
      }
    }
    return queries;
  }

  kernels::IndexerTile tile_of(const IndexerItem& item, StopToken& stop) const {
    const IndexKeys& keys = arguments_.keys;
    const PageTable& pages = arguments_.pages;
    return {
        .num_queries = static_cast<int32_t>(item.count),
        .num_heads = static_cast<int32_t>(arguments_.q.shape[1]),
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
                .pages = pages.page_ids.data() + pages.indptr[row(item, 0).table_row],
                .page_size = keys.page_size,
            },
        .should_stop = &stop_requested,
        .stop_context = &stop,
    };
  }

  /// The flops of an item's products while a trace is on; integer operations do not count.
  int64_t flops(const IndexerItem& item) const {
    if (!tracing() || arguments_.keys.dtype == DType::int8) return 0;
    return 2 * item.cost * arguments_.q.shape[1] * arguments_.q.shape[2];
  }
  DType product_dtype() const {
    return arguments_.keys.dtype == DType::float32 ? DType::float32 : DType::bfloat16;
  }

  const IndexerArguments& arguments_;
  const int32_t topk_;
  const int threads_;
  std::vector<IndexerRow> rows_;
  IndexerItems work_;
};

/// The selections of the parts of items, until they are merged.
class PartResults {
 public:
  PartResults(const Call& call, int32_t topk)
      : call_(call),
        topk_(topk),
        stride_((topk + 15) / 16 * 16),
        indices_(new int32_t[call.work().num_slots * stride_]),
        values_(new float[call.work().num_slots * stride_]) {}

  void direct(const IndexerItem& item, int64_t i, kernels::IndexerQuery& query) const {
    query.indices = indices_.get() + item.slot(i) * stride_;
    query.values = values_.get() + item.slot(i) * stride_;
  }

  template <class Direct>
  void merge(bool sorted, Direct direct) const {
    std::vector<IndexerItem> split;
    std::ranges::copy_if(call_.work().items, std::back_inserter(split), [](const auto& item) {
      return item.num_parts > 1 && item.part == 0;
    });
    const auto& kernels = active_sparse_kernels().indexer;
    parallel_for(std::ssize(split), call_.threads(), [&](int64_t index, StopToken&) {
      const TraceSpan span(TraceScope::merge);
      const auto bytes = static_cast<std::size_t>(kernels.merge_scratch_bytes(topk_));
      void* scratch = thread_scratch(call_.function(), bytes);
      for (int64_t i = 0; i < split[index].count; ++i) {
        kernels::IndexerQuery to{};
        direct(split[index], i, to);
        const int64_t slot = split[index].slot(i);
        const IndexerRow& row = call_.row(split[index], i);
        const kernels::IndexerParts parts{
            .indices = indices_.get() + slot * stride_,
            .values = values_.get() + slot * stride_,
            .num_parts = split[index].num_parts,
            .num_keys = row.end - row.begin,
            .stride = stride_,
            .topk = topk_,
            .sorted = sorted,
            .out_indices = to.indices,
            .out_values = to.values,
        };
        kernels.merge(&parts, scratch);
      }
    });
  }

 private:
  const Call& call_;
  const int32_t topk_;
  const int64_t stride_;
  const std::unique_ptr<int32_t[]> indices_;
  const std::unique_ptr<float[]> values_;
};

}  // namespace

void indexer_logits(const IndexerArguments& arguments, const TensorView& logits) {
  check_indexer_arguments(arguments);
  check_tensor(arguments.function, "logits", logits, 2);
  const int64_t columns = logits.shape[1];
  check_indexer_result(arguments, "logits", logits, DType::float32, columns);
  for (const IndexerRow& row : arguments.rows) {
    check(
        row.begin >= row.end || row.end <= columns, arguments.function, ": logits have ", columns,
        " columns, too few for keys [", row.begin, ", ", row.end, ") of query ", row.query
    );
  }
  const TraceSpan span(TraceScope::call, 0, arguments.keys.dtype, arguments.function);
  const Call call(arguments, 0);
  for (int64_t query : call.other_queries()) {
    std::fill_n(row_of<float>(logits, query), columns, kNoScore);
  }
  call.run(false, [&](const IndexerItem& item, int64_t i, kernels::IndexerQuery& query) {
    const IndexerRow& row = call.row(item, i);
    auto* out = row_of<float>(logits, row.query);
    query.logits = out + query.begin;
    if (item.part > 0) return;
    std::fill(out, out + row.begin, kNoScore);
    std::fill(out + row.end, out + columns, kNoScore);
  });
}

void indexer_topk(const IndexerArguments& arguments, const IndexerTopk& topk) {
  const char* function = arguments.function;
  check_indexer_arguments(arguments);
  check(
      topk.topk >= 1 && topk.topk <= kMaxIndexerTopk, function, ": topk must be 1 to ",
      kMaxIndexerTopk, ", got ", topk.topk
  );
  const auto k = static_cast<int32_t>(topk.topk);
  for (const IndexerRow& row : arguments.rows) {
    const int64_t num_keys = row.begin < row.end ? row.end - row.begin : 0;
    check(
        num_keys <= INT32_MAX, function, ": indices of ", num_keys, " keys do not fit into int32"
    );
  }
  check_indexer_result(arguments, "indices", topk.indices, DType::int32, k);
  if (topk.values) {
    check_indexer_result(arguments, "values", *topk.values, DType::float32, k);
    check_no_overlap(function, "values", *topk.values, "indices", topk.indices);
  }
  const TraceSpan span(TraceScope::call, 0, arguments.keys.dtype, function);
  const Call call(arguments, k);
  for (int64_t query : call.other_queries()) {
    std::fill_n(row_of<int32_t>(topk.indices, query), k, -1);
    if (topk.values) std::fill_n(row_of<float>(*topk.values, query), k, kNoScore);
  }
  const auto direct = [&](const IndexerItem& item, int64_t i, kernels::IndexerQuery& query) {
    const int64_t row = call.row(item, i).query;
    query.indices = row_of<int32_t>(topk.indices, row);
    query.values = topk.values ? row_of<float>(*topk.values, row) : nullptr;
  };
  const PartResults parts(call, k);
  call.run(topk.sorted, [&](const IndexerItem& item, int64_t i, kernels::IndexerQuery& query) {
    item.num_parts == 1 ? direct(item, i, query) : parts.direct(item, i, query);
  });
  parts.merge(topk.sorted, direct);
}

}  // namespace cpattn
