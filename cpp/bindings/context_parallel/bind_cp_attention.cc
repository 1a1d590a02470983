// SPDX-License-Identifier: Apache-2.0
#include "bindings/arguments/arguments.h"
#include "bindings/arguments/kv_format.h"
#include "bindings/arguments/score_bias_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/base/page_size.h"
#include "cpattn/context_parallel/cp_attention.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void run(
    py::handle q,
    py::handle k_cache,
    py::handle v_cache,
    py::handle metadata,
    py::handle block_tables,
    py::handle page_size,
    py::handle num_heads,
    py::handle num_kv_heads,
    py::handle scale,
    py::handle causal,
    py::handle window,
    py::handle softcap,
    py::handle score_bias,
    py::handle sinks,
    py::handle custom_mask,
    py::handle packed_custom_mask,
    py::handle q_rope,
    py::handle k_rope,
    py::handle v_head_dim,
    py::handle k_scale,
    py::handle v_scale,
    py::handle kv_dtype,
    py::handle precise,
    py::handle out,
    py::handle lse
) {
  const Arguments read("do_cp_attn_fia");
  const TensorArgument queries = read.tensor(q, "q");
  const TensorArgument keys = read.tensor(k_cache, "k_cache");
  const auto values = read.optional_tensor(v_cache, "v_cache");
  const auto& share = read.value<ContextParallelMetadata>(metadata, "metadata");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  const ScoreBiasArgument bias(read, score_bias);
  const auto sink_logits = read.optional_tensor(sinks, "sinks");
  const auto mask = read.optional_tensor(custom_mask, "custom_mask");
  const auto packed_mask = read.optional_tensor(packed_custom_mask, "packed_custom_mask");
  const auto rope_queries = read.optional_tensor(q_rope, "q_rope");
  const auto rope_keys = read.optional_tensor(k_rope, "k_rope");
  const int64_t page_tokens = read.integer(page_size, "page_size");
  const int64_t kv_heads = read.integer(num_kv_heads, "num_kv_heads");
  check_page_size(read.function(), page_tokens);
  const std::optional<DType> codes = kv_dtype_value(read, kv_dtype);
  check(
      values.has_value() || v_scale.is_none(), read.function(),
      ": v_scale must not be given without v_cache: values have the scale of keys"
  );
  const ScaleArgument key_scale(read, k_scale, "k_scale"), value_scale(read, v_scale, "v_scale");
  const auto scale_of = [&](const char* name, const ScaleArgument& given) {
    return kv_scale(read.function(), name, given.value, KVAxisOrder::nhd, page_tokens, kv_heads);
  };
  const auto cache = [&](const std::optional<TensorArgument>& given, const char* name) {
    return given ? std::optional(as_codes(read.function(), name, **given, codes)) : std::nullopt;
  };
  const bool is_causal = read.flag(causal, "causal");
  const TensorArgument output = read.output(out, "out");
  const auto lse_output = read.optional_output(lse, "lse");
  const CpAttentionArguments arguments{
      .q = *queries,
      .k_cache = as_codes(read.function(), "k_cache", *keys, codes),
      .v_cache = cache(values, "v_cache"),
      .v_head_dim = read.optional_integer(v_head_dim, "v_head_dim"),
      .q_rope = view_of(rope_queries),
      .k_rope = cache(rope_keys, "k_rope"),
      .k_scale = scale_of("k_scale", key_scale),
      .v_scale = scale_of("v_scale", value_scale),
      .block_tables = *tables,
      .page_size = page_tokens,
      .num_heads = read.integer(num_heads, "num_heads"),
      .num_kv_heads = kv_heads,
      .scale = read.real(scale, "scale"),
      .visibility =
          {
              .causal = is_causal,
              .window = read.window(window, is_causal),
              .custom_mask = view_of(mask),
              .packed_custom_mask = view_of(packed_mask),
          },
      .softcap = read.real(softcap, "softcap"),
      .bias = bias.value,
      .sinks = view_of(sink_logits),
      .precise = read.flag(precise, "precise"),
      .out = *output,
      .lse = view_of(lse_output),
  };
  const Computation computation;
  do_cp_attn_fia(share, arguments);
}

}  // namespace

void register_cp_attention(py::module_& module) {
  module.def(
      "do_cp_attn_fia", &run, "q"_a, "k_cache"_a, "v_cache"_a, "metadata"_a, "block_tables"_a,
      "page_size"_a, "num_heads"_a, "num_kv_heads"_a, "scale"_a, "causal"_a, "window"_a,
      "softcap"_a, "score_bias"_a, "sinks"_a, "custom_mask"_a, "packed_custom_mask"_a, "q_rope"_a,
      "k_rope"_a, "v_head_dim"_a, "k_scale"_a, "v_scale"_a, "kv_dtype"_a, "precise"_a, "out"_a,
      "lse"_a
  );
}

}  // namespace cpattn::bindings
