// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/kv_format.h"
#include "bindings/arguments/score_bias_argument.h"
#include "bindings/module.h"
#include "cpattn/attention/attention_call.h"
#include "cpattn/attention/merge_state.h"
#include "cpattn/base/check.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// The arguments that describe a batch, kept alive while they are planned.
class SequenceBatchArguments {
 public:
  SequenceBatchArguments(
      const Arguments& read,
      py::handle q_lens,
      py::handle kv_lens,
      py::handle first_positions,
      py::handle block_tables,
      py::handle causal,
      py::handle window,
      py::handle custom_mask,
      py::handle packed_custom_mask,
      py::handle allow_short_kv,
      py::handle batch_invariant,
      py::handle precise
  )
      : block_tables_(read.optional_table(block_tables, "block_tables")),
        custom_mask_(read.optional_tensor(custom_mask, "custom_mask")),
        packed_custom_mask_(read.optional_tensor(packed_custom_mask, "packed_custom_mask")) {
    batch.q_lens = read.ints(q_lens, "q_lens");
    if (!kv_lens.is_none()) batch.kv_lens = read.ints(kv_lens, "kv_lens");
    batch.first_positions = read.optional_ints(first_positions, "first_positions");
    batch.block_tables = view_of(block_tables_);
    std::optional<std::vector<uint8_t>> causal_of_each = read.flags(causal, "causal");
    const bool all = std::ranges::all_of(*causal_of_each, std::identity());
    if (is_bool(causal)) causal_of_each.reset();
    batch.visibility = {
        .causal = all,
        .causal_of_each = std::move(causal_of_each),
        .window = read.window(window, all),
        .custom_mask = view_of(custom_mask_),
        .packed_custom_mask = view_of(packed_custom_mask_),
    };
    batch.allow_short_kv = read.flag(allow_short_kv, "allow_short_kv");
    batch.batch_invariant = read.flag(batch_invariant, "batch_invariant");
    batch.precise = read.flag(precise, "precise");
  }

  SequenceBatch batch;

 private:
  std::optional<IndexTableArgument> block_tables_;
  std::optional<TensorArgument> custom_mask_, packed_custom_mask_;
};

/// The arguments of a layer, kept alive while it runs.
class LayerCallArguments {
 public:
  LayerCallArguments(
      const Arguments& read,
      py::handle q,
      py::handle k_cache,
      py::handle v_cache,
      py::handle kv_layout,
      py::handle k_scale,
      py::handle v_scale,
      py::handle kv_dtype,
      py::handle scale,
      py::handle softcap,
      py::handle score_bias,
      py::handle sinks,
      py::handle out,
      py::handle lse
  )
      : q_(read.tensor(q, "q")),
        k_(read.tensor(k_cache, "k_cache")),
        v_(read.tensor(v_cache, "v_cache")),
        out_(read.output(out, "out")),
        k_scale_(read, k_scale, "k_scale"),
        v_scale_(read, v_scale, "v_scale"),
        bias_(read, score_bias),
        sinks_(read.optional_tensor(sinks, "sinks")),
        lse_(read.optional_output(lse, "lse")) {
    call = {
        .q = *q_,
        .k_cache = *k_,
        .v_cache = *v_,
        .kv_layout = read.kv_layout(kv_layout),
        .k_scale = k_scale_.value,
        .v_scale = v_scale_.value,
        .softcap = read.real(softcap, "softcap"),
        .bias = bias_.value,
        .sinks = view_of(sinks_),
        .out = *out_,
        .lse = view_of(lse_),
    };
    if (!kv_dtype.is_none()) call.kv_dtype = kv_dtype_ = read.text(kv_dtype, "kv_dtype");
    if (!scale.is_none()) call.scale = read.real(scale, "scale");
  }
  LayerCallArguments(const LayerCallArguments&) = delete;
  LayerCallArguments& operator=(const LayerCallArguments&) = delete;

  LayerCall call;

 private:
  TensorArgument q_, k_, v_, out_;
  ScaleArgument k_scale_, v_scale_;
  ScoreBiasArgument bias_;
  std::optional<TensorArgument> sinks_, lse_;
  std::string kv_dtype_;
};

void check_bias_of_lens(
    py::handle score_bias, py::handle num_heads, py::handle q_lens, py::handle kv_lens
) {
  const Arguments read("paged_attention");
  const ScoreBiasArgument bias(read, score_bias);
  const std::vector<int64_t> queries = read.ints(q_lens, "q_lens");
  const std::vector<int64_t> keys = read.ints(kv_lens, "kv_lens");
  std::vector<SequenceLens> lens(queries.size());
  for (std::size_t i = 0; i < lens.size(); ++i) lens[i] = {queries[i], keys.at(i)};
  check_bias(read.function(), bias.value, read.integer(num_heads, "num_heads"), lens);
}

AttentionPlan plan(
    py::handle q_lens,
    py::handle kv_lens,
    py::handle first_positions,
    py::handle block_tables,
    py::handle page_size,
    py::handle num_pages,
    py::handle num_heads,
    py::handle num_kv_heads,
    py::handle head_dim,
    py::handle v_head_dim,
    py::handle causal,
    py::handle window,
    py::handle custom_mask,
    py::handle packed_custom_mask,
    py::handle allow_short_kv,
    py::handle batch_invariant,
    py::handle precise,
    py::handle num_threads
) {
  const Arguments read("plan_attention");
  SequenceBatchArguments given(
      read, q_lens, kv_lens, first_positions, block_tables, causal, window, custom_mask,
      packed_custom_mask, allow_short_kv, batch_invariant, precise
  );
  given.batch.shape = {
      .num_heads = read.integer<int32_t>(num_heads, "num_heads"),
      .num_kv_heads = read.integer<int32_t>(num_kv_heads, "num_kv_heads"),
      .head_dim = read.integer<int32_t>(head_dim, "head_dim"),
      .v_head_dim = read.integer<int32_t>(v_head_dim, "v_head_dim"),
  };
  given.batch.page_size = read.integer(page_size, "page_size");
  given.batch.num_pages = read.integer(num_pages, "num_pages");
  const int threads = read.threads(num_threads);
  const GilRelease nogil;
  return plan_sequences(read.function(), given.batch, threads);
}

void run(
    py::handle plan,
    py::handle q,
    py::handle k_cache,
    py::handle v_cache,
    py::handle kv_layout,
    py::handle k_scale,
    py::handle v_scale,
    py::handle kv_dtype,
    py::handle scale,
    py::handle softcap,
    py::handle score_bias,
    py::handle sinks,
    py::handle out,
    py::handle lse
) {
  const Arguments read("run_attention");
  const auto& division = read.value<AttentionPlan>(plan, "plan");
  const LayerCallArguments layer(
      read, q, k_cache, v_cache, kv_layout, k_scale, v_scale, kv_dtype, scale, softcap, score_bias,
      sinks, out, lse
  );
  const Computation computation;
  run_attention(read.function(), division, layer.call);
}

void plan_and_run(
    py::handle q,
    py::handle k_cache,
    py::handle v_cache,
    py::handle q_lens,
    py::handle kv_lens,
    py::handle first_positions,
    py::handle block_tables,
    py::handle kv_indptr,
    py::handle kv_indices,
    py::handle last_page_len,
    py::handle page_size,
    py::handle kv_layout,
    py::handle k_scale,
    py::handle v_scale,
    py::handle kv_dtype,
    py::handle scale,
    py::handle causal,
    py::handle window,
    py::handle softcap,
    py::handle score_bias,
    py::handle sinks,
    py::handle custom_mask,
    py::handle packed_custom_mask,
    py::handle allow_short_kv,
    py::handle batch_invariant,
    py::handle precise,
    py::handle num_threads,
    py::handle out,
    py::handle lse,
    py::handle q_rope,
    py::handle k_rope,
    py::handle key_ranges
) {
  const Arguments read("paged_attention");
  LayerCallArguments layer(
      read, q, k_cache, v_cache, kv_layout, k_scale, v_scale, kv_dtype, scale, softcap, score_bias,
      sinks, out, lse
  );
  const auto rope_queries = read.optional_tensor(q_rope, "q_rope");
  const auto rope_keys = read.optional_tensor(k_rope, "k_rope");
  layer.call.q_rope = view_of(rope_queries);
  layer.call.k_rope = view_of(rope_keys);
  layer.call.page_size = read.optional_integer(page_size, "page_size");
  SequenceBatchArguments given(
      read, q_lens, kv_lens, first_positions, block_tables, causal, window, custom_mask,
      packed_custom_mask, allow_short_kv, batch_invariant, precise
  );
  given.batch.visibility.key_ranges = read.optional_ints(key_ranges, "key_ranges");
  given.batch.csr = csr_pages(
      read.function(), !kv_lens.is_none(), read.optional_ints(kv_indptr, "kv_indptr"),
      read.optional_ints(kv_indices, "kv_indices"),
      read.optional_ints(last_page_len, "last_page_len")
  );
  const int threads = read.threads(num_threads);
  const Computation computation;
  paged_attention(
      read.function(), std::move(given.batch), layer_arguments(read.function(), layer.call), threads
  );
}

void merge(py::handle out_a, py::handle lse_a, py::handle out_b, py::handle lse_b) {
  const Arguments read("merge_state");
  const TensorArgument oa = read.output(out_a, "out_a");
  const TensorArgument la = read.output(lse_a, "lse_a");
  const TensorArgument ob = read.tensor(out_b, "out_b");
  const TensorArgument lb = read.tensor(lse_b, "lse_b");
  const Computation computation;
  merge_state(*oa, *la, *ob, *lb);
}

void merge_parts(
    py::handle outs, py::handle lses, py::handle sinks, py::handle out, py::handle lse
) {
  const Arguments read("merge_states");
  const auto run = [&](const auto& parts, const auto& lses_of_parts) {
    const auto sink = read.optional_tensor(sinks, "sinks");
    const TensorArgument to = read.output(out, "out");
    const TensorArgument lse_to = read.output(lse, "lse");
    const Computation computation;
    merge_states(parts, lses_of_parts, view_of(sink), *to, *lse_to);
  };
  if (TensorListArgument::is_list(outs)) {
    const TensorListArgument parts(read, outs, "outs"), lses_of_parts(read, lses, "lses");
    run(parts.views(), lses_of_parts.views());
  } else {
    const TensorArgument parts = read.tensor(outs, "outs");
    const TensorArgument lses_of_parts = read.tensor(lses, "lses");
    run(*parts, *lses_of_parts);
  }
}

}  // namespace

void register_attention(py::module_& module) {
  module.def(
      "default_scale",
      [](const std::string& function, int64_t head_dim) {
        return default_scale(function.c_str(), head_dim);
      },
      "function"_a, "head_dim"_a
  );
  module.def(
      "refuse_missing_scale",
      [](const std::string& function, const std::string& name) {
        refuse_missing_scale(function.c_str(), name.c_str());
      },
      "function"_a, "name"_a
  );
  module.def(
      "check_bias", &check_bias_of_lens, "score_bias"_a, "num_heads"_a, "q_lens"_a, "kv_lens"_a
  );
  module.def(
      "plan_attention", &plan, "q_lens"_a, "kv_lens"_a, "first_positions"_a, "block_tables"_a,
      "page_size"_a, "num_pages"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "v_head_dim"_a,
      "causal"_a, "window"_a, "custom_mask"_a, "packed_custom_mask"_a, "allow_short_kv"_a,
      "batch_invariant"_a, "precise"_a, "num_threads"_a
  );
  module.def(
      "run_attention", &run, "plan"_a, "q"_a, "k_cache"_a, "v_cache"_a, "kv_layout"_a, "k_scale"_a,
      "v_scale"_a, "kv_dtype"_a, "scale"_a, "softcap"_a, "score_bias"_a, "sinks"_a, "out"_a, "lse"_a
  );
  module.def(
      "paged_attention", &plan_and_run, "q"_a, "k_cache"_a, "v_cache"_a, "q_lens"_a, "kv_lens"_a,
      "first_positions"_a, "block_tables"_a, "kv_indptr"_a, "kv_indices"_a, "last_page_len"_a,
      "page_size"_a, "kv_layout"_a, "k_scale"_a, "v_scale"_a, "kv_dtype"_a, "scale"_a, "causal"_a,
      "window"_a, "softcap"_a, "score_bias"_a, "sinks"_a, "custom_mask"_a, "packed_custom_mask"_a,
      "allow_short_kv"_a, "batch_invariant"_a, "precise"_a, "num_threads"_a, "out"_a, "lse"_a,
      "q_rope"_a = py::none(), "k_rope"_a = py::none(), "key_ranges"_a = py::none()
  );
  module.def("merge_state", &merge, "out_a"_a, "lse_a"_a, "out_b"_a, "lse_b"_a);
  module.def("merge_states", &merge_parts, "outs"_a, "lses"_a, "sinks"_a, "out"_a, "lse"_a);
}

}  // namespace cpattn::bindings
