// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/index_argument.h"
#include "bindings/int_arrays.h"
#include "bindings/module.h"
#include "bindings/num_threads.h"
#include "bindings/tensor_argument.h"
#include "cpattn/check.h"
#include "cpattn/merge_state.h"
#include "cpattn/paged_attention.h"
#include "cpattn/sequence_batch.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

KvCacheLayout parse_layout(const char* function, const std::string& layout) {
  check(
      layout == "NHD" || layout == "HND", function, ": kv_layout must be 'NHD' or 'HND', got '",
      layout, "'"
  );
  return layout == "NHD" ? KvCacheLayout::nhd : KvCacheLayout::hnd;
}

/// The arguments that describe a batch, kept alive while they are planned.
class SequenceBatchArguments {
 public:
  SequenceBatchArguments(
      const char* function,
      py::handle q_lens,
      py::handle kv_lens,
      py::handle block_tables,
      py::handle kv_indptr,
      py::handle kv_indices,
      py::handle last_page_len,
      bool causal,
      std::optional<int64_t> window,
      py::handle custom_mask
  )
      : function_(function) {
    batch.q_lens = list("q_lens", q_lens);
    if (!kv_lens.is_none()) batch.kv_lens = list("kv_lens", kv_lens);
    if (!block_tables.is_none()) {
      const std::string name = concat(function, ": block_tables");
      block_tables_.emplace(block_tables, name.c_str());
      batch.block_tables = **block_tables_;
    }
    if (!kv_indptr.is_none() || !kv_indices.is_none() || !last_page_len.is_none()) {
      check(
          !kv_indptr.is_none() && !kv_indices.is_none() && !last_page_len.is_none(), function,
          ": kv_indptr, kv_indices and last_page_len must be given together"
      );
      check(kv_lens.is_none(), function, ": kv_lens must not be given beside last_page_len");
      batch.csr = CsrPages{
          list("kv_indptr", kv_indptr), list("kv_indices", kv_indices),
          list("last_page_len", last_page_len)
      };
    }
    batch.causal = causal;
    batch.window = window;
    if (!custom_mask.is_none()) {
      custom_mask_.emplace(custom_mask, "custom_mask");
      batch.custom_mask = **custom_mask_;
    }
  }

  SequenceBatch batch;

 private:
  std::vector<int64_t> list(const char* argument, py::handle values) const {
    return index_list(values, concat(function_, ": ", argument).c_str());
  }

  const char* function_;
  std::optional<IndexTableArgument> block_tables_;
  std::optional<TensorArgument> custom_mask_;
};

/// The tensors of a layer, kept alive while it runs.
class LayerArguments {
 public:
  LayerArguments(
      const char* function,
      py::handle q,
      py::handle k_cache,
      py::handle v_cache,
      std::optional<int64_t> page_size,
      const std::string& kv_layout,
      double scale,
      double softcap,
      py::handle sinks,
      py::handle out,
      py::handle lse
  )
      : q_(q, "q"),
        k_(k_cache, "k_cache"),
        v_(v_cache, "v_cache"),
        out_(output_argument(out, "out")) {
    const KvCacheLayout layout = parse_layout(function, kv_layout);
    arguments.function = function;
    arguments.q = *q_;
    arguments.k = paged_cache(function, "k_cache", *k_, layout, page_size);
    arguments.v = paged_cache(function, "v_cache", *v_, layout, page_size);
    arguments.scale = scale;
    arguments.softcap = softcap;
    if (!sinks.is_none()) {
      sinks_.emplace(sinks, "sinks");
      arguments.sinks = **sinks_;
    }
    arguments.out = *out_;
    if (!lse.is_none()) {
      lse_.emplace(output_argument(lse, "lse"));
      arguments.lse = **lse_;
    }
  }

  AttentionArguments arguments;

 private:
  TensorArgument q_, k_, v_, out_;
  std::optional<TensorArgument> sinks_, lse_;
};

std::string describe(const AttentionPlan& plan) {
  const AttentionShape& shape = plan.batch.shape;
  return concat(
      "AttentionPlan(", plan.batch.segments.size(), " segments, ", plan.batch.num_rows, " rows, ",
      plan.items.size(), " items, heads ", shape.num_heads, "/", shape.num_kv_heads, " x ",
      shape.head_dim, "/", shape.v_head_dim, ", ", plan.batch.num_pages, " pages of ",
      plan.batch.page_size, ")"
  );
}

void bind_plan(py::module_& module) {
  py::class_<AttentionPlan>(module, "AttentionPlan", R"(Work division of one attention batch.

Made once by plan_attention and reusable for every layer. A value: it can be compared and
printed, and its arrays are read-only NumPy views.)")
      .def(py::self == py::self)
      .def("__repr__", &describe)
      .def_property_readonly("num_rows", [](const AttentionPlan& p) { return p.batch.num_rows; })
      .def_property_readonly(
          "num_heads", [](const AttentionPlan& p) { return p.batch.shape.num_heads; }
      )
      .def_property_readonly(
          "num_kv_heads", [](const AttentionPlan& p) { return p.batch.shape.num_kv_heads; }
      )
      .def_property_readonly(
          "head_dim", [](const AttentionPlan& p) { return p.batch.shape.head_dim; }
      )
      .def_property_readonly(
          "v_head_dim", [](const AttentionPlan& p) { return p.batch.shape.v_head_dim; }
      )
      .def_property_readonly("page_size", [](const AttentionPlan& p) { return p.batch.page_size; })
      .def_property_readonly("num_pages", [](const AttentionPlan& p) { return p.batch.num_pages; })
      .def_property_readonly(
          "page_indptr",
          [](const py::object& self) {
            return int_view(std::span(self.cast<const AttentionPlan&>().batch.pages.indptr), self);
          },
          "int64 [num_sequences + 1]: sequence s owns page_ids[page_indptr[s]:page_indptr[s + 1]]."
      )
      .def_property_readonly(
          "page_ids",
          [](const py::object& self) {
            return int_view(
                std::span(self.cast<const AttentionPlan&>().batch.pages.page_ids), self
            );
          },
          "int32: the pages that will be read, sequence by sequence."
      )
      .def_property_readonly(
          "items",
          [](const AttentionPlan& plan) {
            py::array_t<int64_t> items(
                {static_cast<py::ssize_t>(plan.items.size()), py::ssize_t{7}}
            );
            auto cells = items.mutable_unchecked<2>();
            for (std::size_t i = 0; i < plan.items.size(); ++i) {
              const AttentionItem& item = plan.items[i];
              const int64_t row[] = {
                  item.segment,   item.first_token, item.num_tokens, item.first_head,
                  item.num_heads, item.kv_begin,    item.kv_end,
              };
              for (int column = 0; column < 7; ++column) cells(i, column) = row[column];
            }
            return items;
          },
          "int64 [num_items, 7]: segment, first_token, num_tokens, first_head, num_heads, "
          "kv_begin, "
          "kv_end."
      )
      .def_property_readonly(
          "part_keys", [](const AttentionPlan& p) { return p.part_keys; },
          "The keys of short sequences are divided at multiples of this."
      )
      .def_property_readonly(
          "item_costs",
          [](const py::object& self) {
            return int_view(std::span(self.cast<const AttentionPlan&>().item_costs), self);
          },
          "int64 [num_items]: visible (row, key) pairs of each item, with its packing."
      );
}

}  // namespace

void register_attention(py::module_& module) {
  bind_plan(module);
  module.def(
      "plan_attention",
      [](const py::object& q_lens, const py::object& kv_lens, const py::object& block_tables,
         int64_t page_size, int64_t num_pages, int32_t num_heads, int32_t num_kv_heads,
         int32_t head_dim, int32_t v_head_dim, bool causal, std::optional<int64_t> window,
         const py::object& custom_mask, bool allow_short_kv, bool batch_invariant,
         std::optional<int> num_threads) {
        static constexpr char kFunction[] = "plan_attention";
        const int threads = parse_threads(kFunction, num_threads);
        SequenceBatchArguments given(
            kFunction, q_lens, kv_lens, block_tables, py::none(), py::none(), py::none(), causal,
            window, custom_mask
        );
        given.batch.shape = {num_heads, num_kv_heads, head_dim, v_head_dim};
        given.batch.page_size = page_size;
        given.batch.num_pages = num_pages;
        given.batch.allow_short_kv = allow_short_kv;
        given.batch.batch_invariant = batch_invariant;
        const py::gil_scoped_release nogil;
        return plan_sequences(kFunction, given.batch, threads);
      },
      "q_lens"_a, "kv_lens"_a, "block_tables"_a, "page_size"_a, "num_pages"_a, "num_heads"_a,
      "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a, "causal"_a, "window"_a, "custom_mask"_a,
      "allow_short_kv"_a, "batch_invariant"_a, "num_threads"_a
  );
  module.def(
      "run_attention",
      [](const AttentionPlan& plan, const py::object& q, const py::object& k_cache,
         const py::object& v_cache, const std::string& kv_layout, double scale, double softcap,
         const py::object& sinks, const py::object& out, const py::object& lse) {
        const LayerArguments layer(
            "run_attention", q, k_cache, v_cache, plan.batch.page_size, kv_layout, scale, softcap,
            sinks, out, lse
        );
        const Computation computation;
        run_attention(plan, layer.arguments);
      },
      "plan"_a, "q"_a, "k_cache"_a, "v_cache"_a, "kv_layout"_a, "scale"_a, "softcap"_a, "sinks"_a,
      "out"_a, "lse"_a
  );
  module.def(
      "paged_attention",
      [](const py::object& q, const py::object& k_cache, const py::object& v_cache,
         const py::object& q_lens, const py::object& kv_lens, const py::object& block_tables,
         const py::object& kv_indptr, const py::object& kv_indices, const py::object& last_page_len,
         std::optional<int64_t> page_size, const std::string& kv_layout, double scale, bool causal,
         std::optional<int64_t> window, double softcap, const py::object& sinks,
         const py::object& custom_mask, bool allow_short_kv, bool batch_invariant,
         std::optional<int> num_threads, const py::object& out, const py::object& lse) {
        static constexpr char kFunction[] = "paged_attention";
        const int threads = parse_threads(kFunction, num_threads);
        const LayerArguments layer(
            kFunction, q, k_cache, v_cache, page_size, kv_layout, scale, softcap, sinks, out, lse
        );
        SequenceBatchArguments given(
            kFunction, q_lens, kv_lens, block_tables, kv_indptr, kv_indices, last_page_len, causal,
            window, custom_mask
        );
        const AttentionArguments& arguments = layer.arguments;
        given.batch.shape = attention_shape(arguments);
        given.batch.page_size = arguments.k.page_size;
        given.batch.num_pages = std::min(arguments.k.num_pages, arguments.v.num_pages);
        given.batch.num_rows = arguments.q.shape[0];
        given.batch.allow_short_kv = allow_short_kv;
        given.batch.batch_invariant = batch_invariant;
        const Computation computation;
        run_attention(plan_sequences(kFunction, given.batch, threads), arguments);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "q_lens"_a, "kv_lens"_a, "block_tables"_a, "kv_indptr"_a,
      "kv_indices"_a, "last_page_len"_a, "page_size"_a, "kv_layout"_a, "scale"_a, "causal"_a,
      "window"_a, "softcap"_a, "sinks"_a, "custom_mask"_a, "allow_short_kv"_a, "batch_invariant"_a,
      "num_threads"_a, "out"_a, "lse"_a
  );
  module.def(
      "merge_state",
      [](const py::object& out_a, const py::object& lse_a, const py::object& out_b,
         const py::object& lse_b) {
        const TensorArgument oa = output_argument(out_a, "out_a");
        const TensorArgument la = output_argument(lse_a, "lse_a");
        const TensorArgument ob(out_b, "out_b");
        const TensorArgument lb(lse_b, "lse_b");
        const py::gil_scoped_release nogil;
        merge_state(*oa, *la, *ob, *lb);
      },
      "out_a"_a, "lse_a"_a, "out_b"_a, "lse_b"_a
  );
}

}  // namespace cpattn::bindings
