// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/module.h"
#include "cpattn/base/tensor_view.h"
#include "cpattn/sparse/index_rows.h"
#include "cpattn/sparse/kv_rows.h"
#include "cpattn/sparse/split_norm.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// Quantises into rows of one tensor, num_code_bytes of codes and scales before the rest.
void quantize(py::handle nope, py::handle rope, py::handle out, int64_t num_code_bytes) {
  const Arguments read("quantize_kv_rows");
  const TensorArgument nope_view = read.tensor(nope, "nope");
  const TensorArgument rope_view = read.tensor(rope, "rope");
  const TensorArgument out_view = read.output(out, "out");
  check(out_view->dtype == DType::uint8, read.name("out"), " must be uint8, got ", out_view->dtype);
  check(out_view->rank > 0, read.name("out"), " must have dimensions");
  const int64_t rest = out_view->shape[out_view->rank - 1] - num_code_bytes;
  const auto [codes, rope_out] =
      split_last_dim(read.function(), "out", *out_view, num_code_bytes, rest);
  const Computation computation;
  quantize_kv_rows(read.function(), *nope_view, *rope_view, codes, rope_out);
}

void quantize_separate(py::handle nope, py::handle rope, py::handle codes, py::handle rope_out) {
  const Arguments read("quantize_kv_rows_separate");
  const TensorArgument nope_view = read.tensor(nope, "nope");
  const TensorArgument rope_view = read.tensor(rope, "rope");
  const TensorArgument codes_view = read.output(codes, "codes");
  const TensorArgument rope_out_view = read.output(rope_out, "rope_out");
  const Computation computation;
  quantize_kv_rows(read.function(), *nope_view, *rope_view, *codes_view, *rope_out_view);
}

void dequantize(py::handle rows, py::handle indices, py::handle out) {
  const Arguments read("dequantize_kv_rows");
  const TensorArgument rows_view = read.tensor(rows, "rows");
  const auto list = read.optional_ints(indices, "indices");
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  dequantize_kv_rows(*rows_view, list, *out_view);
}

void hadamard(py::handle x, py::handle scale, py::handle out) {
  const Arguments read("hadamard_transform");
  const TensorArgument x_view = read.tensor(x, "x");
  const auto factor = static_cast<float>(read.real(scale, "scale"));
  const TensorArgument out_view = read.output(out, "out");
  const Computation computation;
  hadamard_transform(*x_view, factor, *out_view);
}

/// A function that quantises, and the name of its input.
struct Quantized {
  Arguments read;
  const char* argument;
};
constexpr Quantized kIndex = {Arguments("quantize_index"), "x"};
constexpr Quantized kIndexKeys = {Arguments("write_index_k_cache"), "k"};

template <const Quantized& names>
void quantize_rows(py::handle x, bool power_of_two, py::handle codes, py::handle scale) {
  constexpr const Arguments& read = names.read;
  const TensorArgument x_view = read.tensor(x, names.argument);
  const TensorArgument codes_view = read.output(codes, "codes");
  const TensorArgument scale_view = read.output(scale, "scale");
  const Computation computation;
  quantize_index(*x_view, power_of_two, *codes_view, *scale_view, read.function(), names.argument);
}

void write_cache(py::handle cache, py::handle slots, py::handle k, py::handle k_scale) {
  const Arguments read("write_index_k_cache");
  const TensorArgument cache_view = read.output(cache, "cache");
  const std::vector<int64_t> list = read.ints(slots, "slots");
  const TensorArgument k_view = read.tensor(k, "k");
  const TensorArgument scale_view = read.tensor(k_scale, "k_scale");
  const Computation computation;
  write_index_k_cache(*cache_view, list, *k_view, *scale_view);
}

void read_cache(py::handle cache, py::handle slots, py::handle codes, py::handle scale) {
  const Arguments read("read_index_k_cache");
  const TensorArgument cache_view = read.tensor(cache, "cache");
  const std::vector<int64_t> list = read.ints(slots, "slots");
  const TensorArgument codes_view = read.output(codes, "codes");
  const TensorArgument scale_view = read.output(scale, "scale");
  const Computation computation;
  read_index_k_cache(*cache_view, list, *codes_view, *scale_view);
}

/// The arguments of both functions, whose errors have the names of their own arguments.
struct SplitNames {
  Arguments read;
  const char *q_eps, *kv_eps;
};
constexpr SplitNames kSplit = {Arguments("split_qk_norm"), "q_eps", "kv_eps"};
constexpr SplitNames kFusedSplit = {Arguments("fused_split_qk_norm"), "eps", "eps"};

template <const SplitNames& names>
void split(
    py::handle x,
    py::handle q_weight,
    py::handle kv_weight,
    py::handle q_bias,
    py::handle kv_bias,
    py::handle q_lora_rank,
    py::handle kv_lora_rank,
    py::handle qk_rope_head_dim,
    py::handle q_eps,
    py::handle kv_eps,
    py::handle q,
    py::handle k_nope,
    py::handle k_pe,
    py::handle latent
) {
  const Arguments& read = names.read;
  const TensorArgument x_view = read.tensor(x, "x");
  const TensorArgument q_weight_view = read.tensor(q_weight, "q_weight");
  const TensorArgument kv_weight_view = read.tensor(kv_weight, "kv_weight");
  const auto q_bias_view = read.optional_tensor(q_bias, "q_bias");
  const auto kv_bias_view = read.optional_tensor(kv_bias, "kv_bias");
  const TensorArgument q_view = read.output(q, "q");
  const TensorArgument k_nope_view = read.output(k_nope, "k_nope");
  const TensorArgument k_pe_view = read.output(k_pe, "k_pe");
  const auto latent_view = read.optional_output(latent, "latent_cache");
  const SplitNorm arguments{
      .function = read.function(),
      .x = *x_view,
      .q_weight = *q_weight_view,
      .kv_weight = *kv_weight_view,
      .q_bias = view_of(q_bias_view),
      .kv_bias = view_of(kv_bias_view),
      .q_rank = read.integer(q_lora_rank, "q_lora_rank"),
      .kv_rank = read.integer(kv_lora_rank, "kv_lora_rank"),
      .rope_dim = read.integer(qk_rope_head_dim, "qk_rope_head_dim"),
      .q_eps = static_cast<float>(read.real(q_eps, names.q_eps)),
      .kv_eps = static_cast<float>(read.real(kv_eps, names.kv_eps)),
      .q = *q_view,
      .k_nope = *k_nope_view,
      .k_pe = *k_pe_view,
      .latent = view_of(latent_view),
  };
  const Computation computation;
  split_qk_norm(arguments);
}

template <const SplitNames& names>
void def_split(py::module_& module) {
  module.def(
      names.read.function(), &split<names>, "x"_a, "q_weight"_a, "kv_weight"_a, "q_bias"_a,
      "kv_bias"_a, "q_lora_rank"_a, "kv_lora_rank"_a, "qk_rope_head_dim"_a, "q_eps"_a, "kv_eps"_a,
      "q"_a, "k_nope"_a, "k_pe"_a, "latent"_a
  );
}

}  // namespace

void register_rows(py::module_& module) {
  module.def("quantize_kv_rows", &quantize, "nope"_a, "rope"_a, "out"_a, "num_code_bytes"_a);
  module.def(
      "quantize_kv_rows_separate", &quantize_separate, "nope"_a, "rope"_a, "codes"_a, "rope_out"_a
  );
  module.def("dequantize_kv_rows", &dequantize, "rows"_a, "indices"_a, "out"_a);
  module.def("hadamard_transform", &hadamard, "x"_a, "scale"_a, "out"_a);
  module.def(
      "quantize_index", &quantize_rows<kIndex>, "x"_a, "power_of_two"_a, "codes"_a, "scale"_a
  );
  module.def(
      "quantize_index_keys", &quantize_rows<kIndexKeys>, "x"_a, "power_of_two"_a, "codes"_a,
      "scale"_a
  );
  module.def("write_index_k_cache", &write_cache, "cache"_a, "slots"_a, "k"_a, "k_scale"_a);
  module.def("read_index_k_cache", &read_cache, "cache"_a, "slots"_a, "codes"_a, "scale"_a);
  def_split<kSplit>(module);
  def_split<kFusedSplit>(module);
}

}  // namespace cpattn::bindings
