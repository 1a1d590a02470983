// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/index_rows.h"
#include "cpattn/kv_rows.h"
#include "cpattn/reference.h"
#include "cpattn/split_norm.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

std::optional<TensorView> view_of(const std::optional<TensorArgument>& argument) {
  return argument ? std::optional(**argument) : std::nullopt;
}

void register_kv_rows(py::module_& module) {
  module.def(
      "quantize_kv_rows",
      [](const std::string& function, const py::object& nope, const py::object& rope,
         const py::object& codes, const py::object& rope_out) {
        const TensorArgument nope_view(nope, "nope"), rope_view(rope, "rope");
        const TensorArgument codes_view = output_argument(codes, "codes");
        const TensorArgument rope_out_view = output_argument(rope_out, "rope_out");
        const Computation computation;
        quantize_kv_rows(function.c_str(), *nope_view, *rope_view, *codes_view, *rope_out_view);
      },
      "function"_a, "nope"_a, "rope"_a, "codes"_a, "rope_out"_a
  );
  module.def(
      "dequantize_kv_rows",
      [](const py::object& rows, const py::object& indices, const py::object& out) {
        const TensorArgument rows_view(rows, "rows");
        std::optional<std::vector<int64_t>> list;
        if (!indices.is_none()) list = index_list(indices, "dequantize_kv_rows: indices");
        const TensorArgument out_view = output_argument(out, "out");
        const Computation computation;
        dequantize_kv_rows(*rows_view, list, *out_view);
      },
      "rows"_a, "indices"_a, "out"_a
  );
}

void register_index_rows(py::module_& module) {
  module.def(
      "hadamard_transform",
      [](const py::object& x, float scale, const py::object& out) {
        const TensorArgument x_view(x, "x");
        const TensorArgument out_view = output_argument(out, "out");
        const Computation computation;
        hadamard_transform(*x_view, scale, *out_view);
      },
      "x"_a, "scale"_a, "out"_a
  );
  module.def(
      "quantize_index",
      [](const py::object& x, bool power_of_two, const py::object& codes, const py::object& scale) {
        const TensorArgument x_view(x, "x");
        const TensorArgument codes_view = output_argument(codes, "codes");
        const TensorArgument scale_view = output_argument(scale, "scale");
        const Computation computation;
        quantize_index(*x_view, power_of_two, *codes_view, *scale_view);
      },
      "x"_a, "power_of_two"_a, "codes"_a, "scale"_a
  );
  module.def(
      "write_index_k_cache",
      [](const py::object& cache, const py::object& slots, const py::object& k,
         const py::object& k_scale) {
        const TensorArgument cache_view = output_argument(cache, "cache");
        const auto list = index_list(slots, "write_index_k_cache: slots");
        const TensorArgument k_view(k, "k"), scale_view(k_scale, "k_scale");
        const Computation computation;
        write_index_k_cache(*cache_view, list, *k_view, *scale_view);
      },
      "cache"_a, "slots"_a, "k"_a, "k_scale"_a
  );
  module.def(
      "read_index_k_cache",
      [](const py::object& cache, const py::object& slots, const py::object& codes,
         const py::object& scale) {
        const TensorArgument cache_view(cache, "cache");
        const auto list = index_list(slots, "read_index_k_cache: slots");
        const TensorArgument codes_view = output_argument(codes, "codes");
        const TensorArgument scale_view = output_argument(scale, "scale");
        const Computation computation;
        read_index_k_cache(*cache_view, list, *codes_view, *scale_view);
      },
      "cache"_a, "slots"_a, "codes"_a, "scale"_a
  );
}

void register_split_norm(py::module_& module) {
  module.def(
      "split_qk_norm",
      [](const std::string& function, const py::object& x, const py::object& q_weight,
         const py::object& kv_weight, const py::object& q_bias, const py::object& kv_bias,
         int64_t q_lora_rank, int64_t kv_lora_rank, int64_t qk_rope_head_dim, float q_eps,
         float kv_eps, const py::object& q, const py::object& k_nope, const py::object& k_pe,
         const py::object& latent) {
        const TensorArgument x_view(x, "x");
        const TensorArgument q_weight_view(q_weight, "q_weight");
        const TensorArgument kv_weight_view(kv_weight, "kv_weight");
        const auto q_bias_view = optional_tensor(q_bias, "q_bias");
        const auto kv_bias_view = optional_tensor(kv_bias, "kv_bias");
        const TensorArgument q_view = output_argument(q, "q");
        const TensorArgument k_nope_view = output_argument(k_nope, "k_nope");
        const TensorArgument k_pe_view = output_argument(k_pe, "k_pe");
        std::optional<TensorArgument> latent_view;
        if (!latent.is_none()) latent_view.emplace(output_argument(latent, "latent"));
        const Computation computation;
        split_qk_norm({
            .function = function.c_str(),
            .x = *x_view,
            .q_weight = *q_weight_view,
            .kv_weight = *kv_weight_view,
            .q_bias = view_of(q_bias_view),
            .kv_bias = view_of(kv_bias_view),
            .q_rank = q_lora_rank,
            .kv_rank = kv_lora_rank,
            .rope_dim = qk_rope_head_dim,
            .q_eps = q_eps,
            .kv_eps = kv_eps,
            .q = *q_view,
            .k_nope = *k_nope_view,
            .k_pe = *k_pe_view,
            .latent = view_of(latent_view),
        });
      },
      "function"_a, "x"_a, "q_weight"_a, "kv_weight"_a, "q_bias"_a, "kv_bias"_a, "q_lora_rank"_a,
      "kv_lora_rank"_a, "qk_rope_head_dim"_a, "q_eps"_a, "kv_eps"_a, "q"_a, "k_nope"_a, "k_pe"_a,
      "latent"_a
  );
}

void register_references(py::module_ module) {
  module.def(
      "rms_norm",
      [](const py::object& x, const py::object& weight, const py::object& bias, double eps,
         const py::object& out) {
        const TensorArgument x_view(x, "x"), weight_view(weight, "weight");
        const auto bias_view = optional_tensor(bias, "bias");
        const TensorArgument out_view = output_argument(out, "out");
        const Computation computation;
        reference::rms_norm(*x_view, *weight_view, view_of(bias_view), eps, *out_view);
      },
      "x"_a, "weight"_a, "bias"_a, "eps"_a, "out"_a
  );
  module.def(
      "hadamard_transform",
      [](const py::object& x, double scale, const py::object& out) {
        const TensorArgument x_view(x, "x");
        const TensorArgument out_view = output_argument(out, "out");
        const Computation computation;
        reference::hadamard_transform(*x_view, scale, *out_view);
      },
      "x"_a, "scale"_a, "out"_a
  );
  module.def(
      "dequantize_kv_rows",
      [](const py::object& rows, const py::object& out) {
        const TensorArgument rows_view(rows, "rows");
        const TensorArgument out_view = output_argument(out, "out");
        const Computation computation;
        reference::dequantize_kv_rows(*rows_view, *out_view);
      },
      "rows"_a, "out"_a
  );
}

}  // namespace

void register_rows(py::module_& module) {
  register_kv_rows(module);
  register_index_rows(module);
  register_split_norm(module);
  register_references(module.attr("reference"));
}

}  // namespace cpattn::bindings
