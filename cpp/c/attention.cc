// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "c/call.h"
#include "cpattn/attention/attention_call.h"
#include "cpattn/attention/merge_state.h"

struct cpattn_plan {
  cpattn::AttentionPlan plan;
};

namespace cpattn::c {

template <>
struct Defaults<cpattn_batch> {
  static constexpr std::size_t kFirstSize = 128;
  static cpattn_batch value() {
    return {
        .struct_size = sizeof(cpattn_batch),
        .page_size = CPATTN_NONE,
        .window_left = CPATTN_NONE,
        .window_right = CPATTN_NONE,
        .causal = 1,
        .num_threads = CPATTN_NONE,
    };
  }
};

template <>
struct Defaults<cpattn_attention_shape> {
  static constexpr std::size_t kFirstSize = 32;
  static cpattn_attention_shape value() {
    return {.struct_size = sizeof(cpattn_attention_shape), .v_head_dim = CPATTN_NONE};
  }
};

template <>
struct Defaults<cpattn_layer> {
  static constexpr std::size_t kFirstSize = 160;
  static cpattn_layer value() { return {.struct_size = sizeof(cpattn_layer), .kv_layout = "NHD"}; }
};

namespace {

SequenceBatch sequence_batch(const Call& call, const cpattn_batch& given) {
  SequenceBatch batch;
  batch.q_lens = call.ints(given.q_lens, "q_lens");
  if (given.kv_lens != nullptr) batch.kv_lens = call.ints(given.kv_lens, "kv_lens");
  batch.first_positions = call.optional_ints(given.first_positions, "first_positions");
  if (given.block_tables != nullptr) {
    batch.block_tables = call.table(given.block_tables, "block_tables");
  }
  batch.csr = csr_pages(
      call.function(), given.kv_lens != nullptr, call.optional_ints(given.kv_indptr, "kv_indptr"),
      call.optional_ints(given.kv_indices, "kv_indices"),
      call.optional_ints(given.last_page_len, "last_page_len")
  );
  KeyVisibility& visibility = batch.visibility;
  visibility.causal = call.flag(given.causal, "causal");
  if (given.causal_of_each != nullptr) {
    visibility.causal_of_each = call.flags(given.causal_of_each, "causal_of_each");
    visibility.causal = std::ranges::all_of(*visibility.causal_of_each, std::identity());
  }
  const KeyWindow window{
      .left = Call::optional_int(given.window_left), .right = Call::optional_int(given.window_right)
  };
  if (window.left || window.right) visibility.window = window;
  visibility.custom_mask = call.optional_tensor(given.custom_mask, "custom_mask");
  visibility.packed_custom_mask =
      call.optional_tensor(given.packed_custom_mask, "packed_custom_mask");
  batch.allow_short_kv = call.flag(given.allow_short_kv, "allow_short_kv");
  batch.batch_invariant = call.flag(given.batch_invariant, "batch_invariant");
  batch.precise = call.flag(given.precise, "precise");
  return batch;
}

LayerCall layer_call(const Call& call, const cpattn_layer& given) {
  const auto scale = [&](const cpattn_tensor* tensor, const char* name) {
    return GivenScale{.number = {}, .tensor = call.optional_tensor(tensor, name)};
  };
  LayerCall layer{
      .q = call.tensor(given.q, "q"),
      .k_cache = call.tensor(given.k_cache, "k_cache"),
      .v_cache = call.tensor(given.v_cache, "v_cache"),
      .q_rope = call.optional_tensor(given.q_rope, "q_rope"),
      .k_rope = call.optional_tensor(given.k_rope, "k_rope"),
      .kv_layout = parse_kv_layout(call.function(), call.text(given.kv_layout, "kv_layout")),
      .k_scale = scale(given.k_scale, "k_scale"),
      .v_scale = scale(given.v_scale, "v_scale"),
      .softcap = given.softcap,
      .sinks = call.optional_tensor(given.sinks, "sinks"),
      .out = call.output(given.out, "out"),
      .lse = call.optional_output(given.lse, "lse"),
  };
  if (given.kv_dtype != nullptr) layer.kv_dtype = given.kv_dtype;
  if (given.scale != nullptr) layer.scale = *given.scale;
  layer.bias = {
      .numbers = call.tensors(
          given.bias_of_each, given.num_bias_of_each, "bias_of_each", "num_bias_of_each"
      ),
      .of_each_sequence = given.bias_of_each != nullptr,
      .alibi_slopes = call.optional_tensor(given.alibi_slopes, "alibi_slopes"),
      .relative_bias = call.optional_tensor(given.relative_bias, "relative_bias"),
  };
  if (given.bias != nullptr) {
    check(
        !layer.bias.of_each_sequence, call.function(),
        ": bias must not be given beside bias_of_each"
    );
    layer.bias.numbers = {call.tensor(given.bias, "bias")};
  }
  return layer;
}

}  // namespace
}  // namespace cpattn::c

using cpattn::c::Call;
using cpattn::c::guarded;

cpattn_status cpattn_batch_init(cpattn_batch* batch, size_t struct_size) {
  return guarded([&] { Call("batch_init").initialise(batch, struct_size, "batch"); });
}

cpattn_status cpattn_attention_shape_init(cpattn_attention_shape* shape, size_t struct_size) {
  return guarded([&] { Call("attention_shape_init").initialise(shape, struct_size, "shape"); });
}

cpattn_status cpattn_layer_init(cpattn_layer* layer, size_t struct_size) {
  return guarded([&] { Call("layer_init").initialise(layer, struct_size, "layer"); });
}

cpattn_status cpattn_paged_attention(const cpattn_batch* batch, const cpattn_layer* layer) {
  return guarded([&] {
    constexpr Call call("paged_attention");
    const cpattn_batch given = call.options(batch, "batch");
    cpattn::LayerCall tensors = cpattn::c::layer_call(call, call.options(layer, "layer"));
    tensors.page_size = Call::optional_int(given.page_size);
    cpattn::paged_attention(
        call.function(), cpattn::c::sequence_batch(call, given),
        cpattn::layer_arguments(call.function(), tensors), call.threads(given.num_threads)
    );
  });
}

cpattn_status cpattn_plan_attention(
    const cpattn_batch* batch, const cpattn_attention_shape* shape, cpattn_plan** plan
) {
  return guarded([&] {
    constexpr Call call("plan_attention");
    const cpattn_batch given = call.options(batch, "batch");
    const cpattn_attention_shape dims = call.options(shape, "shape");
    call.object(plan, "plan");
    cpattn::SequenceBatch sequences = cpattn::c::sequence_batch(call, given);
    sequences.shape = {
        .num_heads = dims.num_heads,
        .num_kv_heads = dims.num_kv_heads,
        .head_dim = dims.head_dim,
        .v_head_dim = dims.v_head_dim == CPATTN_NONE ? dims.head_dim : dims.v_head_dim,
    };
    sequences.page_size = given.page_size;
    sequences.num_pages = dims.num_pages;
    const int threads = call.threads(given.num_threads);
    *plan = new cpattn_plan{cpattn::plan_sequences(call.function(), sequences, threads)};
  });
}

cpattn_status cpattn_run_attention(const cpattn_plan* plan, const cpattn_layer* layer) {
  return guarded([&] {
    constexpr Call call("run_attention");
    cpattn::run_attention(
        call.function(), call.object(plan, "plan").plan,
        cpattn::c::layer_call(call, call.options(layer, "layer"))
    );
  });
}

void cpattn_plan_destroy(cpattn_plan* plan) { delete plan; }

cpattn_status cpattn_merge_state(
    const cpattn_tensor* out_a,
    const cpattn_tensor* lse_a,
    const cpattn_tensor* out_b,
    const cpattn_tensor* lse_b
) {
  return guarded([&] {
    constexpr Call call("merge_state");
    cpattn::merge_state(
        call.output(out_a, "out_a"), call.output(lse_a, "lse_a"), call.tensor(out_b, "out_b"),
        call.tensor(lse_b, "lse_b")
    );
  });
}

cpattn_status cpattn_merge_states(
    const cpattn_tensor* const* outs,
    const cpattn_tensor* const* lses,
    int64_t num_parts,
    const cpattn_tensor* sinks,
    const cpattn_tensor* out,
    const cpattn_tensor* lse
) {
  return guarded([&] {
    constexpr Call call("merge_states");
    cpattn::merge_states(
        call.tensors(outs, num_parts, "outs", "num_parts"),
        call.tensors(lses, num_parts, "lses", "num_parts"), call.optional_tensor(sinks, "sinks"),
        call.output(out, "out"), call.output(lse, "lse")
    );
  });
}
