// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <string>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/bound_class.h"
#include "bindings/module.h"
#include "cpattn/base/check.h"
#include "cpattn/context_parallel/metadata_fields.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Metadata = ContextParallelMetadata;

/// Returns the combined maximum, or None without combined fields.
py::object max_seqlen_q_combined(const Metadata& metadata) {
  if (metadata.kv_len_combined.data() == nullptr) return py::none();
  return py::int_(metadata.max_seqlen_q_combined);
}

py::object as_list(const Metadata& metadata, const CpArrayField& field) {
  const Metadata::Ints values = metadata.*field.values;
  if (values.data() == nullptr) return py::none();
  return int_list(values);
}

py::object as_list(const Metadata& metadata, const CpComputedField& field) {
  if (metadata.strategy == CpStrategy::interleave) return py::none();
  return int_list(field.compute(metadata));
}

py::object weights_of(const Metadata& metadata) {
  if (metadata.weights == nullptr || metadata.weights->weights.empty()) return py::none();
  return py::cast(metadata.weights->weights);
}

py::object page_size_of(const Metadata& metadata) {
  if (metadata.weights == nullptr || metadata.weights->page_size == 0) return py::none();
  return py::int_(metadata.weights->page_size);
}

/// Descriptors of the interpreter's own kind: cheaper to read than a pybind11
/// property, and engines read two dozen of them per forward pass.
template <class Read>
PyObject* guarded(PyObject* self, Read read) noexcept {
  try {
    return read(py::handle(self).cast<const Metadata&>()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Field>
PyObject* get_list(PyObject* self, void* field) noexcept {
  return guarded(self, [field](const Metadata& metadata) -> py::object {
    return as_list(metadata, *static_cast<const Field*>(field));
  });
}

PyObject* get_tensor(PyObject* self, void* field) noexcept {
  return guarded(self, [self, field](const Metadata& metadata) -> py::object {
    const auto values = cp_tensor_values(metadata, *static_cast<const CpArrayField*>(field));
    if (values.data() == nullptr) return py::none();
    return int_view(values, self);
  });
}

PyObject* get_int(PyObject* self, void* field) noexcept {
  return guarded(self, [field](const Metadata& metadata) -> py::object {
    return py::int_(metadata.*static_cast<const CpIntField*>(field)->value);
  });
}

template <getter get, std::size_t n, class Field>
void add_getters(py::handle type, const Field (&fields)[n], const char* doc) {
  static PyGetSetDef definitions[n];
  for (std::size_t i = 0; i < n; ++i) {
    definitions[i] = {fields[i].name, get, nullptr, doc, const_cast<Field*>(&fields[i])};
    auto* raw_type = reinterpret_cast<PyTypeObject*>(type.ptr());
    const auto descriptor =
        py::reinterpret_steal<py::object>(PyDescr_NewGetSet(raw_type, &definitions[i]));
    if (!descriptor) throw py::error_already_set();
    py::setattr(type, fields[i].name, descriptor);
  }
}

py::dict to_dict(const Metadata& metadata) {
  py::dict out;
  out["strategy"] = std::string(cp_strategy_name(metadata.strategy));
  out["kv_len_convention"] = std::string(kv_len_convention_name(metadata.kv_len_convention));
  for (const CpIntField& field : kCpInts) out[field.name] = metadata.*field.value;
  out["max_seqlen_q_combined"] = max_seqlen_q_combined(metadata);
  for (const CpArrayField& field : kCpLists) out[field.name] = as_list(metadata, field);
  for (const CpComputedField& field : kCpLayouts) out[field.name] = as_list(metadata, field);
  for (const CpArrayField& field : kCpTensors) {
    const Metadata::Ints values = cp_tensor_values(metadata, field);
    out[field.name] = values.data() == nullptr ? py::object(py::none()) : int_list(values);
  }
  return out;
}

std::string repr(const Metadata& metadata) {
  return concat(
      "ContextParallelMetadata(strategy='", cp_strategy_name(metadata.strategy),
      "', cp_rank=", metadata.cp_rank, ", cp_size=", metadata.cp_size, ", bs=", metadata.bs,
      ", total_seq_lens=", metadata.total_seq_lens,
      ", per_rank_actual_token=", std::string(py::repr(int_list(metadata.per_rank_actual_token))),
      ", kv_len_convention='", kv_len_convention_name(metadata.kv_len_convention), "')"
  );
}

/// A hash of the fields in which metadata differ as a rule.
int64_t hash_of(const Metadata& metadata) {
  ValueHash hash;
  hash << metadata.cp_rank << metadata.cp_size << metadata.bs << metadata.total_seq_lens;
  hash << static_cast<int64_t>(metadata.strategy) << metadata.extend_lens << metadata.prefix_lens;
  return hash.value();
}

/// The arguments that the metadata is built from.
py::tuple python_state(const Metadata& metadata) {
  std::vector<int64_t> seq_lens(metadata.extend_lens.begin(), metadata.extend_lens.end());
  for (int32_t s = 0; s < metadata.bs; ++s) seq_lens[s] += metadata.prefix_lens[s];
  return py::make_tuple(
      int_list(metadata.extend_lens), py::cast(seq_lens), metadata.cp_rank, metadata.cp_size,
      std::string(cp_strategy_name(metadata.strategy)),
      std::string(kv_len_convention_name(metadata.kv_len_convention)), metadata.is_physical,
      weights_of(metadata), page_size_of(metadata)
  );
}
constexpr std::size_t kStateFields = 9;

Metadata restore(const py::tuple& fields) {
  constexpr Arguments read("ContextParallelMetadata");
  const std::vector<int64_t> extend_lens = read.ints(fields[0], "extend_lens");
  const std::vector<int64_t> seq_lens = read.ints(fields[1], "seq_lens");
  const auto weights = read.optional_reals(fields[7], "weights");
  CpBatch batch = {
      .extend_lens = extend_lens,
      .seq_lens = seq_lens,
      .cp_size = read.integer(fields[3], "cp_size"),
      .strategy = parse_cp_strategy(read.text(fields[4], "strategy"), read.function()),
      .kv_len_convention =
          parse_kv_len_convention(read.text(fields[5], "kv_len_convention"), read.function()),
      .page_size = read.optional_integer(fields[8], "page_size"),
  };
  if (weights) batch.weights = *weights;
  const bool is_physical = read.flag(fields[6], "is_physical");
  const Metadata metadata = build_cp_metadata(batch, read.integer(fields[2], "cp_rank"));
  return is_physical ? pad_to_physical(metadata) : metadata;
}

/// shard_per_request of engines: the local rows of each sequence that has any,
/// and which sequences these are, each as a list and as an array.
py::tuple shard_per_request(const Metadata& metadata) {
  std::vector<int32_t> q_lens, bs_idx;
  const std::vector<int32_t> rows = rows_per_request(metadata);
  for (int32_t s = 0; s < metadata.bs; ++s) {
    if (rows[s] == 0) continue;
    q_lens.push_back(rows[s]);
    bs_idx.push_back(s);
  }
  const py::list q_list = int_list(q_lens), bs_list = int_list(bs_idx);
  return py::make_tuple(
      q_list, int_array(std::move(q_lens)), bs_list, int_array(std::move(bs_idx))
  );
}

/// The *_tensor fields in their order, each at a multiple of `alignment` elements
/// of one new array, and the sizes to cut it into: of each field and, unless alignment is 1, of the
/// gap after it.
py::tuple packed_tensors(const Metadata& metadata, std::size_t alignment) {
  check(alignment >= 1, "_packed_tensors: alignment must be >= 1, got ", alignment);
  std::vector<int32_t> packed, sizes;
  packed.reserve(16 * metadata.bs + std::size(kCpTensors) * alignment);
  for (const CpArrayField& field : kCpTensors) {
    const Metadata::Ints values = metadata.*field.values;
    check(
        values.data() != nullptr, "build_cp_metadata: ", field.name,
        " exists for zigzag only, and where it fits into int32"
    );
    packed.insert(packed.end(), values.begin(), values.end());
    sizes.push_back(static_cast<int32_t>(values.size()));
    if (alignment == 1) continue;
    const std::size_t gap = (alignment - packed.size() % alignment) % alignment;
    sizes.push_back(static_cast<int32_t>(gap));
    packed.resize(packed.size() + gap);
  }
  return py::make_tuple(py::array_t<int32_t>(packed.size(), packed.data()), int_list(sizes));
}

void add_fields(py::class_<Metadata>& type) {
  add_getters<get_int>(type, kCpInts, "int");
  constexpr auto kListDoc = "list of int, or None where the strategy has no such field";
  add_getters<get_list<CpArrayField>>(type, kCpLists, kListDoc);
  add_getters<get_list<CpComputedField>>(type, kCpLayouts, kListDoc);
  add_getters<get_tensor>(
      type, kCpTensors, "read-only int32 array, or None where the strategy has no such field"
  );
  type.def_property_readonly(
      "max_seqlen_q_combined", &max_seqlen_q_combined,
      "int, or None where the strategy has no such field"
  );
  type.def_property_readonly(
      "strategy",
      [](const Metadata& metadata) { return std::string(cp_strategy_name(metadata.strategy)); },
      "zigzag, interleave or contiguous."
  );
  type.def_property_readonly(
      "kv_len_convention",
      [](const Metadata& metadata) {
        return std::string(kv_len_convention_name(metadata.kv_len_convention));
      },
      "baked or bare: whether kv_len_* count the cached prefix."
  );
}

void add_weights(py::class_<Metadata>& type) {
  type.def_property_readonly(
      "weights", &weights_of, "Shares of the ranks as given: list of float, or None."
  );
  type.def_property_readonly(
      "page_size", &page_size_of, "Positions on whose multiples blocks begin: int, or None."
  );
  type.def_property_readonly(
      "per_rank_pairs", [](const Metadata& metadata) { return py::cast(per_rank_pairs(metadata)); },
      "Pairs of a new token and a key that it sees, of a causal mask, of each rank: list of int, "
      "computed on each access."
  );
  type.def_property_readonly(
      "imbalance", &imbalance,
      "The largest share of a rank in all pairs over its share in the weights: float, 1 for a "
      "perfect balance and for a batch without new tokens."
  );
}

/// Adds the properties that are computed on each access: arrays and lists over rows and sequences.
void add_rows(py::class_<Metadata>& type) {
  type.def_property_readonly(
      "local_q_indices",
      [](const Metadata& metadata) { return int_array(local_q_indices(metadata)); },
      "Position of each logical local row in the token order of the batch: int32 array, computed "
      "on each access."
  );
  type.def_property_readonly(
      "query_request_indices",
      [](const Metadata& metadata) { return int_array(query_request_indices(metadata)); },
      "Sequence of each logical local row: int32 array, computed on each access."
  );
  type.def_property_readonly(
      "query_cache_lengths",
      [](const Metadata& metadata) { return int_array(query_cache_lengths(metadata)); },
      "Keys each logical local row sees, prefix + position + 1: int32 array, computed on each "
      "access."
  );
  type.def("_gathered_row_indices", [](const Metadata& metadata) {
    return int_array(gathered_row_indices(metadata));
  });
  type.def("_packed_tensors", &packed_tensors);
  type.def("_logical_rows", [](const Metadata& metadata) {
    return int_list(metadata.logical_rows());
  });
  type.def(
      "pad_to_physical", &pad_to_physical,
      "The same plan with as many rows on every rank: the longest rank's, rounded up to a multiple "
      "of 2 * cp_size (zigzag) or cp_size. A new object; padding twice changes nothing."
  );
  type.def(
      "rows_per_request",
      [](const Metadata& metadata) { return int_list(rows_per_request(metadata)); },
      "Local rows of each sequence, zeros kept: list of int. Interleave only, else ValueError."
  );
  type.def(
      "shard_per_request", &shard_per_request,
      "Local rows of each sequence that has any, and the indices of these sequences: (list, int32 "
      "array, list, int32 array). Interleave only, else ValueError."
  );
}

}  // namespace

void register_context_parallel_metadata(py::module_& module) {
  py::class_<Metadata> type(
      module, "ContextParallelMetadata", py::module_local(),
      R"(One rank's share of a batch under context parallelism.

Made by build_cp_metadata. A value: it can be compared, hashed, pickled and printed, and its arrays
are read-only. Its fields have the names that engines give them; `shard` takes the rank's rows of a
tensor, `unshard` puts the rows of all ranks together.

Examples
--------
>>> import cpattn
>>> plan = cpattn.build_cp_metadata([10], [15], cp_rank=0, cp_size=2)
>>> plan.local_q_indices.tolist(), plan.query_cache_lengths.tolist()
([0, 1, 2, 8, 9], [6, 7, 8, 14, 15])
>>> plan.prefix_lens, plan.split_list, plan.zigzag_index
([5], [3, 3, 2, 2], [0, 3]))"
  );
  add_fields(type);
  add_weights(type);
  add_rows(type);
  type.def("to_dict", &to_dict, "Every field by name, as plain int, str, list of int or None.");
  type.def("__repr__", &repr);
  type.def(
      "__eq__", [](const Metadata& a, const Metadata& b) { return a == b; }, py::is_operator()
  );
  type.def("__hash__", &hash_of);
  define_state(
      module, type, &python_state, "restore_context_parallel_metadata", kStateFields, &restore
  );
  copy_by_reference(type);
}

}  // namespace cpattn::bindings
