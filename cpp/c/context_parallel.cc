// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "c/call.h"
#include "cpattn/context_parallel/metadata_fields.h"

struct cpattn_cp_metadata {
  cpattn::ContextParallelMetadata metadata;
  // Arrays that any thread computes on first access.
  mutable std::mutex mutex;
  mutable std::map<std::string_view, std::vector<int32_t>> computed;
};

namespace cpattn::c {

template <>
struct Defaults<cpattn_cp_batch> {
  static constexpr std::size_t kFirstSize = 72;
  static cpattn_cp_batch value() {
    return {
        .struct_size = sizeof(cpattn_cp_batch),
        .strategy = "zigzag",
        .num_tokens = CPATTN_NONE,
        .kv_len_convention = "baked",
        .page_size = CPATTN_NONE,
    };
  }
};

namespace {

using Metadata = ContextParallelMetadata;

/// Fields of local rows and sequences.
constexpr CpComputedField kRowFields[] = {
    {"local_q_indices", &local_q_indices},
    {"query_request_indices", &query_request_indices},
    {"query_cache_lengths", &query_cache_lengths},
    {"rows_per_request", &rows_per_request},
};

cpattn_cp_metadata* new_metadata(Metadata metadata) {
  auto made = std::make_unique<cpattn_cp_metadata>();
  made->metadata = std::move(metadata);
  return made.release();
}

Metadata::Ints computed_array(const cpattn_cp_metadata& owner, const CpComputedField& field) {
  const std::scoped_lock lock(owner.mutex);
  auto found = owner.computed.find(field.name);
  if (found == owner.computed.end()) {
    std::vector<int32_t> values = field.compute(owner.metadata);
    values.reserve(1);  // an empty array is not null: null means no array
    found = owner.computed.emplace(field.name, std::move(values)).first;
  }
  return found->second;
}

/// The array of that name; its data() is null if the strategy has no such field.
Metadata::Ints array_of(const Call& call, const cpattn_cp_metadata& owner, std::string_view name) {
  for (const CpArrayField& field : kCpLists) {
    if (name == field.name) return owner.metadata.*field.values;
  }
  for (const CpArrayField& field : kCpTensors) {
    if (name == field.name) return cp_tensor_values(owner.metadata, field);
  }
  for (const CpComputedField& field : kCpLayouts) {
    if (name != field.name) continue;
    if (owner.metadata.strategy == CpStrategy::interleave) return {};
    return computed_array(owner, field);
  }
  for (const CpComputedField& field : kRowFields) {
    if (name == field.name) return computed_array(owner, field);
  }
  check(false, call.function(), ": name must be that of an array, got '", name, "'");
  return {};
}

int64_t int_of(const Call& call, const Metadata& metadata, std::string_view name) {
  for (const CpIntField& field : kCpInts) {
    if (name == field.name) return metadata.*field.value;
  }
  check(
      name == "max_seqlen_q_combined", call.function(), ": name must be that of a number, got '",
      name, "'"
  );
  if (metadata.kv_len_combined.data() == nullptr) return CPATTN_NONE;
  return metadata.max_seqlen_q_combined;
}

}  // namespace
}  // namespace cpattn::c

using cpattn::c::Call;
using cpattn::c::guarded;

cpattn_status cpattn_cp_batch_init(cpattn_cp_batch* batch, size_t struct_size) {
  return guarded([&] { Call("cp_batch_init").initialise(batch, struct_size, "batch"); });
}

cpattn_status cpattn_build_cp_metadata(
    const cpattn_cp_batch* batch, cpattn_cp_metadata** metadata
) {
  return guarded([&] {
    constexpr Call call("build_cp_metadata");
    const cpattn_cp_batch given = call.options(batch, "batch");
    call.object(metadata, "metadata");
    const auto extend_lens = call.optional_ints(given.extend_lens, "extend_lens");
    const auto seq_lens = call.optional_ints(given.seq_lens, "seq_lens");
    const auto weights = call.optional_reals(given.weights, "weights");
    cpattn::CpBatch read{
        .num_tokens = Call::optional_int(given.num_tokens),
        .cp_size = given.cp_size,
        .strategy =
            cpattn::parse_cp_strategy(call.text(given.strategy, "strategy"), call.function()),
        .kv_len_convention = cpattn::parse_kv_len_convention(
            call.text(given.kv_len_convention, "kv_len_convention"), call.function()
        ),
        .page_size = Call::optional_int(given.page_size),
        .compat = call.flag(given.compat, "compat"),
    };
    if (extend_lens) read.extend_lens = *extend_lens;
    if (seq_lens) read.seq_lens = *seq_lens;
    if (weights) read.weights = *weights;
    *metadata = cpattn::c::new_metadata(cpattn::build_cp_metadata(read, given.cp_rank));
  });
}

cpattn_status cpattn_cp_metadata_pad_to_physical(
    const cpattn_cp_metadata* metadata, cpattn_cp_metadata** padded
) {
  return guarded([&] {
    constexpr Call call("pad_to_physical");
    call.object(padded, "padded");
    *padded = cpattn::c::new_metadata(
        cpattn::pad_to_physical(call.object(metadata, "metadata").metadata)
    );
  });
}

void cpattn_cp_metadata_destroy(cpattn_cp_metadata* metadata) { delete metadata; }

cpattn_status cpattn_cp_metadata_int(
    const cpattn_cp_metadata* metadata, const char* name, int64_t* value
) {
  return guarded([&] {
    constexpr Call call("cp_metadata_int");
    call.object(value, "value") = cpattn::c::int_of(
        call, call.object(metadata, "metadata").metadata, call.text(name, "name")
    );
  });
}

cpattn_status cpattn_cp_metadata_array(
    const cpattn_cp_metadata* metadata, const char* name, const int32_t** values, int64_t* size
) {
  return guarded([&] {
    constexpr Call call("cp_metadata_array");
    call.object(values, "values");
    call.object(size, "size");
    const auto array =
        cpattn::c::array_of(call, call.object(metadata, "metadata"), call.text(name, "name"));
    *values = array.data();
    *size = static_cast<int64_t>(array.size());
  });
}
