// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/cp_attention.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {

void register_cp_attention(py::module_& module) {
  module.def(
      "do_cp_attn_fia",
      [](const py::object& q, const py::object& k_cache, const py::object& v_cache,
         const ContextParallelMetadata& metadata, const py::object& block_tables, int64_t page_size,
         int64_t num_heads, int64_t num_kv_heads, double scale, const py::object& out,
         const py::object& lse) {
        const TensorArgument queries(q, "q"), keys(k_cache, "k_cache"), values(v_cache, "v_cache");
        const IndexTableArgument tables(block_tables, "do_cp_attn_fia: block_tables");
        const TensorArgument output = output_argument(out, "out");
        std::optional<TensorArgument> lse_output;
        if (!lse.is_none()) lse_output.emplace(output_argument(lse, "lse"));
        CpAttentionArguments arguments{
            .q = *queries,
            .k_cache = *keys,
            .v_cache = *values,
            .block_tables = *tables,
            .page_size = page_size,
            .num_heads = num_heads,
            .num_kv_heads = num_kv_heads,
            .scale = scale,
            .out = *output,
        };
        if (lse_output) arguments.lse = **lse_output;
        const Computation computation;
        do_cp_attn_fia(metadata, arguments);
      },
      "q"_a, "k_cache"_a, "v_cache"_a, "metadata"_a, "block_tables"_a, "page_size"_a, "num_heads"_a,
      "num_kv_heads"_a, "scale"_a, "out"_a, "lse"_a
  );
}

}  // namespace cpattn::bindings
