// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/kv_format.h"
#include "bindings/arguments/score_bias_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/reference/reference.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void check_float(const Arguments& read, const char* argument, DType dtype) {
  check(
      dtype == DType::float64 || dtype == DType::float32 || dtype == DType::float16 ||
          dtype == DType::bfloat16,
      read.name(argument), " must be a floating-point type, got ", dtype
  );
}

/// A tensor of numbers that the oracle reads as float64.
TensorArgument floats(const Arguments& read, py::handle object, const char* argument) {
  TensorArgument tensor = read.tensor(object, argument);
  check_float(read, argument, tensor->dtype);
  return tensor;
}
std::optional<TensorArgument> optional_floats(
    const Arguments& read, py::handle object, const char* argument
) {
  if (object.is_none()) return std::nullopt;
  return floats(read, object, argument);
}

void check_floats(const Arguments& read, const ScoreBias& bias) {
  for (const TensorView& numbers : bias.numbers) check_float(read, "bias", numbers.dtype);
  if (bias.alibi_slopes) check_float(read, "alibi_slopes", bias.alibi_slopes->dtype);
  if (bias.relative_bias) check_float(read, "relative_bias", bias.relative_bias->dtype);
}

/// A cache of numbers that the oracle reads as float64, or of codes that it decodes.
TensorView read_cache(
    const Arguments& read,
    const TensorArgument& cache,
    const char* name,
    const std::optional<DType>& kv_dtype
) {
  const TensorView view = as_codes(read.function(), name, *cache, kv_dtype);
  if (!is_code(view.dtype)) check_float(read, name, view.dtype);
  return view;
}

/// A scale of a cache: None, a number or a tensor of numbers, which it keeps alive.
class FloatScaleArgument {
 public:
  FloatScaleArgument(const Arguments& read, py::handle scale, const char* name) {
    if (scale.is_none()) return;
    if (is_number(scale)) {
      value.number = read.real(scale, name);
      return;
    }
    tensor_.emplace(floats(read, scale, name));
    value.numbers = **tensor_;
  }

  reference::Scale value;

 private:
  std::optional<TensorArgument> tensor_;
};

void paged_attention(
    py::handle q,
    py::handle k_cache,
    py::handle v_cache,
    py::handle q_lens,
    py::handle kv_lens,
    py::handle first_positions,
    py::handle block_tables,
    py::handle page_size,
    bool hnd,
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
    py::handle out,
    py::handle lse
) {
  const Arguments read("reference.paged_attention");
  const TensorArgument q_view = floats(read, q, "q");
  const TensorArgument k_argument = read.tensor(k_cache, "k_cache");
  const TensorArgument v_argument = read.tensor(v_cache, "v_cache");
  const std::optional<DType> dtype = kv_dtype_value(read, kv_dtype);
  const FloatScaleArgument k_factor(read, k_scale, "k_scale");
  const FloatScaleArgument v_factor(read, v_scale, "v_scale");
  const ScoreBiasArgument added(read, score_bias);
  check_floats(read, added.value);
  const auto sinks_view = optional_floats(read, sinks, "sinks");
  const auto mask_view = read.optional_tensor(custom_mask, "custom_mask");
  const TensorArgument out_view = read.output(out, "out");
  const TensorArgument lse_view = read.output(lse, "lse");
  const IndexTableArgument tables = read.table(block_tables, "block_tables");
  std::vector<uint8_t> causal_of_each = read.flags(causal, "causal");
  const bool all_causal = std::ranges::all_of(causal_of_each, std::identity());
  const reference::PagedAttention batch{
      .q = *q_view,
      .k_cache = read_cache(read, k_argument, "k_cache", dtype),
      .v_cache = read_cache(read, v_argument, "v_cache", dtype),
      .k_scale = k_factor.value,
      .v_scale = v_factor.value,
      .hnd = hnd,
      .page_size = read.integer(page_size, "page_size"),
      .q_lens = read.ints(q_lens, "q_lens"),
      .kv_lens = read.ints(kv_lens, "kv_lens"),
      .first_positions = read.optional_ints(first_positions, "first_positions"),
      .block_tables = *tables,
      .scale = read.real(scale, "scale"),
      .causal_of_each = std::move(causal_of_each),
      .window = read.window(window, all_causal),
      .custom_mask = view_of(mask_view),
      .softcap = read.real(softcap, "softcap"),
      .bias = added.value.numbers,
      .bias_of_each = added.value.of_each_sequence,
      .alibi_slopes = added.value.alibi_slopes,
      .relative_bias = added.value.relative_bias,
      .sinks = view_of(sinks_view),
  };
  const Computation computation;
  reference::paged_attention(batch, *out_view, *lse_view);
}

void flash_mla_sparse_fwd(
    py::handle q,
    py::handle kv,
    py::handle indices,
    py::handle sm_scale,
    py::handle d_v,
    py::handle attn_sink,
    py::handle topk_length,
    py::handle out,
    py::handle max_logits,
    py::handle lse
) {
  const Arguments read("reference.flash_mla_sparse_fwd");
  const TensorArgument q_view = floats(read, q, "q");
  const TensorArgument kv_view = floats(read, kv, "kv");
  const auto sink_view = optional_floats(read, attn_sink, "attn_sink");
  const TensorArgument out_view = read.output(out, "out");
  const TensorArgument max_view = read.output(max_logits, "max_logits");
  const TensorArgument lse_view = read.output(lse, "lse");
  const IndexTableArgument table = read.table(indices, "indices");
  const reference::SparseMla batch{
      .q = *q_view,
      .kv = *kv_view,
      .indices = *table,
      .scale = read.real(sm_scale, "sm_scale"),
      .v_head_dim = read.integer(d_v, "d_v"),
      .topk_length = read.optional_ints(topk_length, "topk_length"),
      .attn_sink = view_of(sink_view),
  };
  const Computation computation;
  reference::flash_mla_sparse_fwd(batch, *out_view, *max_view, *lse_view);
}

void merge_state(
    py::handle out_a,
    py::handle lse_a,
    py::handle out_b,
    py::handle lse_b,
    py::handle out,
    py::handle lse
) {
  const Arguments read("reference.merge_state");
  const TensorArgument out_a_view = floats(read, out_a, "out_a");
  const TensorArgument lse_a_view = floats(read, lse_a, "lse_a");
  const TensorArgument out_b_view = floats(read, out_b, "out_b");
  const TensorArgument lse_b_view = floats(read, lse_b, "lse_b");
  const TensorArgument out_view = read.output(out, "out");
  const TensorArgument lse_view = read.output(lse, "lse");
  const Computation computation;
  reference::merge_state(*out_a_view, *lse_a_view, *out_b_view, *lse_b_view, *out_view, *lse_view);
}

void indexer_logits(
    py::handle q,
    py::handle k,
    py::handle weights,
    py::handle ks,
    py::handle ke,
    py::handle k_scale,
    py::handle out
) {
  const Arguments read("reference.indexer_logits");
  const TensorArgument q_view = floats(read, q, "q");
  const TensorArgument k_view = floats(read, k, "k");
  const TensorArgument weights_view = floats(read, weights, "weights");
  const auto scale_view = optional_floats(read, k_scale, "k_scale");
  const TensorArgument out_view = read.output(out, "out");
  const reference::Indexer indexer{
      .q = *q_view,
      .k = *k_view,
      .weights = *weights_view,
      .k_scale = view_of(scale_view),
      .ks = read.ints(ks, "ks"),
      .ke = read.ints(ke, "ke"),
  };
  const Computation computation;
  reference::indexer_logits(indexer, *out_view);
}

void rms_norm(py::handle x, py::handle weight, py::handle bias, py::handle eps, py::handle out) {
  const Arguments read("reference.rms_norm");
  const TensorArgument x_view = floats(read, x, "x");
  const TensorArgument weight_view = floats(read, weight, "weight");
  const auto bias_view = optional_floats(read, bias, "bias");
  const double added = read.real(eps, "eps");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  reference::rms_norm(*x_view, *weight_view, view_of(bias_view), added, *out_view);
}

void hadamard_transform(py::handle x, py::handle scale, py::handle out) {
  const Arguments read("reference.hadamard_transform");
  const TensorArgument x_view = floats(read, x, "x");
  const double factor = read.real(scale, "scale");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  reference::hadamard_transform(*x_view, factor, *out_view);
}

void dequantize_kv_rows(py::handle rows, py::handle out) {
  const Arguments read("reference.dequantize_kv_rows");
  const TensorArgument rows_view = read.tensor(rows, "rows");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  reference::dequantize_kv_rows(*rows_view, *out_view);
}

}  // namespace

void register_reference(py::module_& module) {
  py::module_ reference = module.def_submodule("reference");
  reference.def(
      "paged_attention", &paged_attention, "q"_a, "k_cache"_a, "v_cache"_a, py::kw_only(),
      "q_lens"_a, "kv_lens"_a, "first_positions"_a, "block_tables"_a, "page_size"_a, "hnd"_a,
      "k_scale"_a, "v_scale"_a, "kv_dtype"_a, "scale"_a, "causal"_a, "window"_a, "softcap"_a,
      "score_bias"_a, "sinks"_a, "custom_mask"_a, "out"_a, "lse"_a
  );
  reference.def(
      "flash_mla_sparse_fwd", &flash_mla_sparse_fwd, "q"_a, "kv"_a, "indices"_a, py::kw_only(),
      "sm_scale"_a, "d_v"_a, "attn_sink"_a, "topk_length"_a, "out"_a, "max_logits"_a, "lse"_a
  );
  reference.def(
      "merge_state", &merge_state, "out_a"_a, "lse_a"_a, "out_b"_a, "lse_b"_a, "out"_a, "lse"_a
  );
  reference.def(
      "indexer_logits", &indexer_logits, "q"_a, "k"_a, "weights"_a, "ks"_a, "ke"_a, "k_scale"_a,
      "out"_a
  );
  reference.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a);
  reference.def("hadamard_transform", &hadamard_transform, "x"_a, "scale"_a, "out"_a);
  reference.def("dequantize_kv_rows", &dequantize_kv_rows, "rows"_a, "out"_a);
}

}  // namespace cpattn::bindings
