// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <optional>

#include "bindings/index_argument.h"
#include "bindings/module.h"
#include "bindings/tensor_argument.h"
#include "cpattn/reference.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

void paged_attention(
    const py::object& q,
    const py::object& k_cache,
    const py::object& v_cache,
    const py::object& q_lens,
    const py::object& kv_lens,
    const py::object& block_tables,
    int64_t page_size,
    bool hnd,
    double scale,
    bool causal,
    std::optional<int64_t> window,
    double softcap,
    const py::object& sinks,
    const py::object& custom_mask,
    const py::object& out,
    const py::object& lse
) {
  const TensorArgument q_view(q, "q"), k_view(k_cache, "k_cache"), v_view(v_cache, "v_cache");
  const auto sinks_view = optional_tensor(sinks, "sinks");
  const auto mask_view = optional_tensor(custom_mask, "custom_mask");
  const TensorArgument out_view = output_argument(out, "out");
  const TensorArgument lse_view = output_argument(lse, "lse");
  const IndexTableArgument tables(block_tables, "reference.paged_attention: block_tables");
  const reference::PagedAttention batch{
      .q = *q_view,
      .k_cache = *k_view,
      .v_cache = *v_view,
      .hnd = hnd,
      .page_size = page_size,
      .q_lens = index_list(q_lens, "reference.paged_attention: q_lens"),
      .kv_lens = index_list(kv_lens, "reference.paged_attention: kv_lens"),
      .block_tables = *tables,
      .scale = scale,
      .causal = causal,
      .window = window,
      .custom_mask = mask_view ? std::optional(**mask_view) : std::nullopt,
      .softcap = softcap,
      .sinks = sinks_view ? std::optional(**sinks_view) : std::nullopt,
  };
  const Computation computation;
  reference::paged_attention(batch, *out_view, *lse_view);
}

void flash_mla_sparse_fwd(
    const py::object& q,
    const py::object& kv,
    const py::object& indices,
    double sm_scale,
    int64_t d_v,
    const py::object& attn_sink,
    const py::object& topk_length,
    const py::object& out,
    const py::object& max_logits,
    const py::object& lse
) {
  constexpr char kIndices[] = "reference.flash_mla_sparse_fwd: indices";
  const TensorArgument q_view(q, "q"), kv_view(kv, "kv");
  const auto sink_view = optional_tensor(attn_sink, "attn_sink");
  const TensorArgument out_view = output_argument(out, "out");
  const TensorArgument max_view = output_argument(max_logits, "max_logits");
  const TensorArgument lse_view = output_argument(lse, "lse");
  const IndexTableArgument table(indices, kIndices);
  reference::SparseMla batch{
      .q = *q_view,
      .kv = *kv_view,
      .indices = *table,
      .scale = sm_scale,
      .v_head_dim = d_v,
      .attn_sink = sink_view ? std::optional(**sink_view) : std::nullopt,
  };
  if (!topk_length.is_none()) {
    batch.topk_length = index_list(topk_length, "reference.flash_mla_sparse_fwd: topk_length");
  }
  const Computation computation;
  reference::flash_mla_sparse_fwd(batch, *out_view, *max_view, *lse_view);
}

void merge_state(
    const py::object& out_a,
    const py::object& lse_a,
    const py::object& out_b,
    const py::object& lse_b,
    const py::object& out,
    const py::object& lse
) {
  const TensorArgument out_a_view(out_a, "out_a"), lse_a_view(lse_a, "lse_a");
  const TensorArgument out_b_view(out_b, "out_b"), lse_b_view(lse_b, "lse_b");
  const TensorArgument out_view = output_argument(out, "out");
  const TensorArgument lse_view = output_argument(lse, "lse");
  const Computation computation;
  reference::merge_state(*out_a_view, *lse_a_view, *out_b_view, *lse_b_view, *out_view, *lse_view);
}

void indexer_logits(
    const py::object& q,
    const py::object& k,
    const py::object& weights,
    const py::object& ks,
    const py::object& ke,
    const py::object& k_scale,
    const py::object& out
) {
  const TensorArgument q_view(q, "q"), k_view(k, "k"), weights_view(weights, "weights");
  const auto scale_view = optional_tensor(k_scale, "k_scale");
  const TensorArgument out_view = output_argument(out, "out");
  const reference::Indexer indexer{
      .q = *q_view,
      .k = *k_view,
      .weights = *weights_view,
      .k_scale = scale_view ? std::optional(**scale_view) : std::nullopt,
      .ks = index_list(ks, "reference.indexer_logits: ks"),
      .ke = index_list(ke, "reference.indexer_logits: ke"),
  };
  const Computation computation;
  reference::indexer_logits(indexer, *out_view);
}

}  // namespace

void register_reference(py::module_& module) {
  py::module_ reference = module.def_submodule("reference");
  reference.def(
      "paged_attention", &paged_attention, "q"_a, "k_cache"_a, "v_cache"_a, py::kw_only(),
      "q_lens"_a, "kv_lens"_a, "block_tables"_a, "page_size"_a, "hnd"_a, "scale"_a, "causal"_a,
      "window"_a, "softcap"_a, "sinks"_a, "custom_mask"_a, "out"_a, "lse"_a
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
}

}  // namespace cpattn::bindings
