// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/bound_class.h"
#include "bindings/context_parallel/forward_mode_argument.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/sparse/dsa_metadata.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Metadata = DsaMetadata;

using ArrayField = BoundMember<Metadata, Metadata::Ints>;
using IntField = BoundMember<Metadata, int32_t>;

struct OptionalField {
  const char* name;
  std::optional<Metadata::Ints> Metadata::* values;
  const char* doc;
  bool is_table = false;  // a row for each sequence
};

constexpr IntField kInts[] = {
    {"topk", &Metadata::topk, "Keys that a row attends to at most."},
    {"page_size", &Metadata::page_size, "Tokens of a page of real_page_table."},
    {"max_seqlen_q", &Metadata::max_seqlen_q, "The largest of extend_lens."},
    {"max_seqlen_k", &Metadata::max_seqlen_k, "The largest of cache_seqlens."},
};

constexpr ArrayField kArrays[] = {
    {"bs_idx", &Metadata::bs_idx, "[n]: index of each sequence in the batch."},
    {"extend_lens", &Metadata::extend_lens, "[n]: rows of q here of each sequence."},
    {"cache_seqlens", &Metadata::cache_seqlens, "[n]: keys of each sequence."},
    {"cu_seqlens_k", &Metadata::cu_seqlens_k, "[n + 1]: running sums of cache_seqlens."},
    {"seqlens_expanded", &Metadata::seqlens_expanded, "[T]: keys that each row sees."},
    {"token_to_batch_idx", &Metadata::token_to_batch_idx, "[T]: position in bs_idx of each row."},
    {"ks", &Metadata::ks, "[T]: first key of each row among those of all sequences."},
    {"ke", &Metadata::ke, "[T]: end of the keys of each row among those of all sequences."},
    {"dsa_cache_seqlens", &Metadata::dsa_cache_seqlens,
     "[num_rows]: keys that each row attends to."},
};

constexpr OptionalField kOptionals[] = {
    {"cu_seqlens_q", &Metadata::cu_seqlens_q, "[n + 1]: running sums of extend_lens, or None."},
    {"dsa_cu_seqlens_k", &Metadata::dsa_cu_seqlens_k,
     "[num_rows + 1]: running sums of dsa_cache_seqlens, or None."},
    {"topk_indices_offset", &Metadata::topk_indices_offset,
     "[T]: ks if the method is RAGGED, or None."},
    {"page_table_1", &Metadata::page_table_1, "[n, max_seqlen_k]: slots of the keys, or None.",
     true},
    {"real_page_table", &Metadata::real_page_table, "[n, pages]: pages of the keys, or None.",
     true},
    {"page_table_1_flattened", &Metadata::page_table_1_flattened,
     "[sum(cache_seqlens)]: slots of the concatenated keys, or None."},
};

py::object view(const py::object& self, const Metadata::Ints& values) {
  return int_view(std::span(values), self);
}

py::object view(const py::object& self, const OptionalField& field) {
  const auto& metadata = self.cast<const Metadata&>();
  const std::optional<Metadata::Ints>& values = metadata.*field.values;
  if (!values) return py::none();
  py::object array = view(self, *values);
  if (!field.is_table) return array;
  const std::size_t rows = metadata.bs_idx.size();
  return array.attr("reshape")(rows, rows == 0 ? 0 : values->size() / rows);
}

py::dict to_dict(const py::object& self) {
  const auto& metadata = self.cast<const Metadata&>();
  py::dict out;
  out["forward_mode"] = static_cast<int>(metadata.forward_mode);
  out["topk_transform_method"] = static_cast<int>(metadata.topk_transform_method);
  for (const IntField& field : kInts) out[field.name] = metadata.*field.member;
  for (const ArrayField& field : kArrays) {
    out[field.name] = view(self, metadata.*field.member).attr("tolist")();
  }
  for (const OptionalField& field : kOptionals) {
    const py::object array = view(self, field);
    out[field.name] = array.is_none() ? array : array.attr("tolist")();
  }
  return out;
}

constexpr const char* kModes[] = {"EXTEND",   "DECODE",        "MIXED",
                                  "IDLE",     "TARGET_VERIFY", "DRAFT_EXTEND_V2",
                                  "PREBUILT", "SPLIT_PREFILL", "DLLM_EXTEND"};

std::string repr(const Metadata& metadata) {
  const bool ragged = metadata.topk_transform_method == TopkTransformMethod::ragged;
  return concat(
      "DsaMetadata(forward_mode=", kModes[static_cast<int>(metadata.forward_mode) - 1],
      ", topk_transform_method=", ragged ? "RAGGED" : "PAGED", ", topk=", metadata.topk,
      ", page_size=", metadata.page_size,
      ", extend_lens=", std::string(py::repr(int_list(metadata.extend_lens))),
      ", cache_seqlens=", std::string(py::repr(int_list(metadata.cache_seqlens))), ")"
  );
}

/// A hash of the fields in which metadata differ as a rule.
int64_t hash_of(const Metadata& metadata) {
  ValueHash hash;
  hash << static_cast<int64_t>(metadata.forward_mode) << metadata.topk << metadata.page_size;
  for (const ArrayField& field : kArrays) {
    hash << std::span<const int32_t>(metadata.*field.member);
  }
  return hash.value();
}

py::tuple python_state(const Metadata& metadata) {
  const DsaMetadataState state = state_of(metadata);
  const auto array = [](const DsaMetadataState::Lens& values) {
    return py::array_t<int64_t>(static_cast<py::ssize_t>(values.size()), values.data());
  };
  py::object page_table = py::none();
  if (state.page_table_1) page_table = array(*state.page_table_1);
  return py::make_tuple(
      static_cast<int>(state.forward_mode), static_cast<int>(state.topk_transform_method),
      state.topk, state.page_size, array(state.bs_idx), array(state.cache_seqlens),
      array(state.token_to_batch_idx), array(state.seqlens_expanded), state.num_rows, page_table,
      state.has_flattened
  );
}
constexpr std::size_t kStateFields = 11;

Metadata restore(const py::tuple& fields) {
  constexpr Arguments read("DsaMetadata");
  const auto mode = optional_mode(fields[0], read.name("forward_mode"));
  const int64_t method = read.integer(fields[1], "topk_transform_method");
  check(mode.has_value(), read.name("forward_mode"), " must be there");
  check(
      method == 1 || method == 2, read.name("topk_transform_method"), " must be 1 or 2, got ",
      method
  );
  return metadata_of({
      .forward_mode = *mode,
      .topk_transform_method = static_cast<TopkTransformMethod>(method),
      .topk = read.integer(fields[2], "topk"),
      .page_size = read.integer(fields[3], "page_size"),
      .bs_idx = read.ints(fields[4], "bs_idx"),
      .cache_seqlens = read.ints(fields[5], "cache_seqlens"),
      .token_to_batch_idx = read.ints(fields[6], "token_to_batch_idx"),
      .seqlens_expanded = read.ints(fields[7], "seqlens_expanded"),
      .num_rows = read.integer(fields[8], "num_rows"),
      .page_table_1 = read.optional_ints(fields[9], "page_table_1"),
      .has_flattened = read.flag(fields[10], "page_table_1_flattened"),
  });
}

/// Keeps the GIL, like the functions of register_context_parallel.
Metadata build(
    py::handle extend_lens,
    py::handle seq_lens,
    py::handle forward_mode,
    py::handle topk,
    py::handle fp8_kv_cache,
    py::handle prefill_impl,
    py::handle page_size,
    py::handle req_to_token,
    py::handle req_pool_indices,
    py::handle num_draft_tokens,
    py::handle cp_metadata,
    py::handle num_rows
) {
  const Arguments read("build_dsa_metadata");
  const auto mode = optional_mode(forward_mode, read.name("forward_mode"));
  check(mode.has_value(), read.name("forward_mode"), " must be given");
  const auto extend = read.optional_ints(extend_lens, "extend_lens");
  const std::vector<int64_t> seq = read.ints(seq_lens, "seq_lens");
  const auto pool_indices = read.optional_ints(req_pool_indices, "req_pool_indices");
  const auto table = read.optional_table(req_to_token, "req_to_token");
  const std::string impl = read.text(prefill_impl, "prefill_impl");
  return build_dsa_metadata({
      .forward_mode = *mode,
      .seq_lens = seq,
      .extend_lens = extend,
      .num_draft_tokens = read.optional_integer(num_draft_tokens, "num_draft_tokens"),
      .topk = read.integer(topk, "topk"),
      .fp8_kv_cache = read.flag(fp8_kv_cache, "fp8_kv_cache"),
      .prefill_impl = impl,
      .page_size = read.integer(page_size, "page_size"),
      .req_to_token = view_of(table),
      .req_pool_indices = pool_indices,
      .cp = read.optional_value<ContextParallelMetadata>(cp_metadata, "cp_metadata"),
      .num_rows = read.optional_integer(num_rows, "num_rows"),
  });
}

}  // namespace

void register_dsa_metadata(py::module_& module) {
  py::class_<Metadata> type(
      module, "DsaMetadata", py::module_local(),
      "The integers of a sparse-attention batch; made by build_dsa_metadata."
  );
  for (const IntField& field : kInts) type.def_readonly(field.name, field.member, field.doc);
  for (const ArrayField& field : kArrays) {
    type.def_property_readonly(
        field.name,
        [field](const py::object& self) {
          return view(self, self.cast<const Metadata&>().*field.member);
        },
        field.doc
    );
  }
  for (const OptionalField& field : kOptionals) {
    type.def_property_readonly(
        field.name, [field](const py::object& self) { return view(self, field); }, field.doc
    );
  }
  type.def_property_readonly("_forward_mode", [](const Metadata& metadata) {
    return static_cast<int>(metadata.forward_mode);
  });
  type.def_property_readonly("_topk_transform_method", [](const Metadata& metadata) {
    return static_cast<int>(metadata.topk_transform_method);
  });
  type.def("to_dict", &to_dict, "Every field by name, as plain int, list of int or None.");
  type.def("__repr__", &repr);
  type.def(py::self == py::self);
  type.def("__hash__", &hash_of);
  define_state(module, type, &python_state, "restore_dsa_metadata", kStateFields, &restore);
  copy_by_reference(type);
  module.def("build_dsa_metadata", &build);
}

}  // namespace cpattn::bindings
