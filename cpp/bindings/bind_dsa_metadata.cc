// SPDX-License-Identifier: Apache-2.0
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/forward_mode_argument.h"
#include "bindings/index_argument.h"
#include "bindings/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/check.h"
#include "cpattn/dsa_metadata.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Metadata = DsaMetadata;
using OptionalInts = std::optional<Metadata::Ints>;

struct ArrayField {
  const char* name;
  Metadata::Ints Metadata::* values;
};

struct OptionalField {
  const char* name;
  OptionalInts Metadata::* values;
  bool is_table = false;  // a row for each sequence
};

struct IntField {
  const char* name;
  int32_t Metadata::* value;
};

constexpr IntField kInts[] = {
    {"topk", &Metadata::topk},
    {"page_size", &Metadata::page_size},
    {"max_seqlen_q", &Metadata::max_seqlen_q},
    {"max_seqlen_k", &Metadata::max_seqlen_k},
};

constexpr ArrayField kArrays[] = {
    {"bs_idx", &Metadata::bs_idx},
    {"extend_lens", &Metadata::extend_lens},
    {"cache_seqlens", &Metadata::cache_seqlens},
    {"cu_seqlens_k", &Metadata::cu_seqlens_k},
    {"seqlens_expanded", &Metadata::seqlens_expanded},
    {"token_to_batch_idx", &Metadata::token_to_batch_idx},
    {"ks", &Metadata::ks},
    {"ke", &Metadata::ke},
    {"dsa_cache_seqlens", &Metadata::dsa_cache_seqlens},
};

constexpr OptionalField kOptionals[] = {
    {"cu_seqlens_q", &Metadata::cu_seqlens_q},
    {"dsa_cu_seqlens_k", &Metadata::dsa_cu_seqlens_k},
    {"topk_indices_offset", &Metadata::topk_indices_offset},
    {"page_table_1", &Metadata::page_table_1, true},
    {"real_page_table", &Metadata::real_page_table, true},
    {"page_table_1_flattened", &Metadata::page_table_1_flattened},
};

py::object view(const py::object& self, const Metadata::Ints& values) {
  return int_view(std::span(values), self);
}

py::object view(const py::object& self, const OptionalField& field) {
  const auto& metadata = self.cast<const Metadata&>();
  const OptionalInts& values = metadata.*field.values;
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
  for (const IntField& field : kInts) out[field.name] = metadata.*field.value;
  for (const ArrayField& field : kArrays) {
    out[field.name] = view(self, metadata.*field.values).attr("tolist")();
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

std::optional<std::vector<int64_t>> optional_ints(const char* argument, py::handle values) {
  return optional_index_list(values, concat("build_dsa_metadata: ", argument).c_str());
}

std::optional<int64_t> optional_int(const char* argument, py::handle value) {
  if (value.is_none()) return std::nullopt;
  return index_value(value, concat("build_dsa_metadata: ", argument).c_str());
}

/// As in register_context_parallel, the GIL stays held.
Metadata build(
    const py::object& extend_lens,
    const py::object& seq_lens,
    const py::object& forward_mode,
    const py::object& topk,
    bool fp8_kv_cache,
    const std::string& prefill_impl,
    const py::object& page_size,
    const py::object& req_to_token,
    const py::object& req_pool_indices,
    const py::object& num_draft_tokens,
    const ContextParallelMetadata* cp,
    const py::object& num_rows
) {
  const auto mode = optional_mode(forward_mode, "build_dsa_metadata: forward_mode");
  check(mode.has_value(), "build_dsa_metadata: forward_mode must be given");
  const auto extend = optional_ints("extend_lens", extend_lens);
  const std::vector<int64_t> seq = index_list(seq_lens, "build_dsa_metadata: seq_lens");
  const auto pool_indices = optional_ints("req_pool_indices", req_pool_indices);
  std::optional<IndexTableArgument> table;
  if (!req_to_token.is_none()) table.emplace(req_to_token, "build_dsa_metadata: req_to_token");
  return build_dsa_metadata({
      .forward_mode = *mode,
      .seq_lens = seq,
      .extend_lens = extend,
      .num_draft_tokens = optional_int("num_draft_tokens", num_draft_tokens),
      .topk = index_value(topk, "build_dsa_metadata: topk"),
      .fp8_kv_cache = fp8_kv_cache,
      .prefill_impl = prefill_impl,
      .page_size = index_value(page_size, "build_dsa_metadata: page_size"),
      .req_to_token = table ? std::optional(**table) : std::nullopt,
      .req_pool_indices = pool_indices,
      .cp = cp,
      .num_rows = optional_int("num_rows", num_rows),
  });
}

}  // namespace

void register_dsa_metadata(py::module_& module) {
  py::class_<Metadata> type(
      module, "DsaMetadata", "The integers of a sparse-attention batch; made by build_dsa_metadata."
  );
  for (const IntField& field : kInts) type.def_readonly(field.name, field.value);
  for (const ArrayField& field : kArrays) {
    type.def_property_readonly(field.name, [field](const py::object& self) {
      return view(self, self.cast<const Metadata&>().*field.values);
    });
  }
  for (const OptionalField& field : kOptionals) {
    type.def_property_readonly(field.name, [field](const py::object& self) {
      return view(self, field);
    });
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
  module.def("build_dsa_metadata", &build);
}

}  // namespace cpattn::bindings
