// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/base/prefix_sums.h"
#include "cpattn/distributed/held_rows.h"
#include "cpattn/distributed/key_scratch.h"
#include "cpattn/distributed/key_share.h"
#include "cpattn/distributed/sequence_call.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

template <class Value>
std::shared_ptr<const Value> shared(
    const Arguments& read, py::handle object, const char* argument
) {
  static_cast<void>(read.value<Value>(object, argument));
  return object.cast<std::shared_ptr<Value>>();
}

BatchKeys interleaved_keys(py::handle pages, const Interleave& interleave) {
  return {shared<BatchPages>(Arguments("BatchKeys"), pages, "pages"), interleave};
}

BatchKeys placed_keys(
    py::handle pages, py::handle num_ranks, py::handle ids, py::handle owners, py::handle rows
) {
  const Arguments read("BatchKeys");
  const std::vector<int64_t> placed = read.ints(ids, "ids"), of_slots = read.ints(owners, "owners"),
                             at = read.ints(rows, "rows");
  return {
      shared<BatchPages>(read, pages, "pages"), read.integer(num_ranks, "num_ranks"),
      PlacedSlots{.pages = placed, .owners = of_slots, .rows = at}
  };
}

std::vector<int64_t> new_lens(const Arguments& read, const BatchKeys& keys, py::handle q_lens) {
  std::vector<int64_t> lens = read.ints(q_lens, "q_lens");
  check(
      lens.size() == keys.pages().kv_lens.size(), read.function(), ": q_lens must be of ",
      keys.pages().bs(), " requests, got ", lens.size()
  );
  return lens;
}

HeldRows rows_held(
    const std::shared_ptr<const BatchKeys>& self,
    const std::pair<py::handle, py::handle>& tokens,
    py::handle rows_per_rank,
    py::handle owners,
    py::handle window
) {
  const Arguments read("held_rows");
  const std::vector<int64_t> queries = new_lens(read, *self, tokens.first);
  return held_rows(
      self, {.q_lens = queries, .padding = read.integer(tokens.second, "padding")},
      read.ints(rows_per_rank, "rows_per_rank"), read.ints(owners, "owners"),
      read.optional_integer(window, "window")
  );
}

/// The fields of a KeyScratch; `part` has those of a KeyPart.
py::tuple scratch_of(
    const std::shared_ptr<const BatchKeys>& self,
    const std::pair<py::handle, py::handle>& tokens,
    const std::pair<py::handle, py::handle>& rows,
    py::handle rows_per_rank,
    const std::array<bool, 3>& part,
    py::handle window
) {
  const Arguments read("plan_key_scratch");
  const std::vector<int64_t> queries = new_lens(read, *self, tokens.first);
  const TokenRows placed{
      .request = read.ints(rows.first, "request"), .position = read.ints(rows.second, "position")
  };
  check(
      placed.request.size() == placed.position.size(),
      "plan_key_scratch: request and position must be of equal lengths"
  );
  for (const int64_t request : placed.request) {
    check(
        request >= 0 && request < self->pages().bs(), "plan_key_scratch: request must be in [0, ",
        self->pages().bs(), "), got ", request
    );
  }
  KeyScratch scratch = plan_key_scratch(
      self, {.q_lens = queries, .padding = read.integer(tokens.second, "padding")}, placed,
      read.ints(rows_per_rank, "rows_per_rank"),
      {.cached = part[0], .new_in_pools = part[1], .new_rows = part[2]},
      read.optional_integer(window, "window")
  );
  py::list sent;
  for (std::vector<int64_t>& of_rank : scratch.sent_rows) {
    sent.append(own_array(std::move(of_rank)));
  }
  PaddedTable& tables = scratch.block_tables;
  return py::make_tuple(
      int_array(std::move(tables.values)).attr("reshape")(self->pages().bs(), tables.columns),
      scratch.num_slots, sent, own_array(std::move(scratch.slots)),
      own_array(std::move(scratch.new_rows))
  );
}

KeyShare make_share(py::handle keys, py::handle ranks) {
  const Arguments read("KeyShare");
  return {shared<BatchKeys>(read, keys, "keys"), read.ints(ranks, "ranks")};
}

LocalPages make_local_pages(py::handle page_size, py::handle indptr, py::handle ids) {
  const Arguments read("LocalPages");
  LocalPages pages{
      .page_size = read.integer(page_size, "page_size"),
      .indptr = read.ints(indptr, "indptr"),
      .ids = read.ints(ids, "ids"),
  };
  check(pages.page_size >= 1, "LocalPages: page_size must be >= 1, got ", pages.page_size);
  check_prefix_sums(
      "LocalPages", "indptr", pages.indptr,
      {.leading_zero = true,
       .reaches_total = true,
       .total = static_cast<int64_t>(pages.ids.size()),
       .total_name = "the number of ids"}
  );
  return pages;
}

/// Checks a request of a share, and that a position is at most its length less `beyond`.
void check_position(const KeyShare& share, int64_t request, int64_t position, int64_t beyond) {
  const std::vector<int64_t>& lens = share.keys().pages().kv_lens;
  check(
      request >= 0 && request < std::ssize(lens), "KeyShare: request must be in [0, ", lens.size(),
      "), got ", request
  );
  check(
      position <= lens[request] - beyond, "KeyShare: position must be at most ",
      lens[request] - beyond, ", got ", position
  );
}

py::array count_below(const KeyShare& self, py::handle request, py::handle position) {
  const Arguments read("KeyShare");
  const std::vector<int64_t> requests = read.ints(request, "request");
  std::vector<int64_t> counts = read.ints(position, "position");
  check(
      requests.size() == counts.size(), "KeyShare: position must have ", requests.size(),
      " values, got ", counts.size()
  );
  for (std::size_t i = 0; i < counts.size(); ++i) {
    check(counts[i] >= 0, "KeyShare: position must be >= 0, got ", counts[i]);
    check_position(self, requests[i], counts[i], 0);
    counts[i] = self.count_below(requests[i], counts[i]);
  }
  return own_array(std::move(counts));
}

py::array counts(const KeyShare& self) {
  std::vector<int64_t> values(self.keys().pages().bs());
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = self.count(static_cast<int64_t>(i));
  }
  return own_array(std::move(values));
}

py::tuple local_keys(const KeyShare& self) {
  LocalKeys keys = self.local_keys();
  return py::make_tuple(
      own_array(std::move(keys.request)), own_array(std::move(keys.position)),
      own_array(std::move(keys.row))
  );
}

/// int32 rows of the positions [n, k] of requests [n]; -1 for positions that the share does not
/// have.
py::array rows_of(const KeyShare& self, py::handle request, py::handle positions) {
  const Arguments read("KeyShare");
  const std::vector<int64_t> requests = read.ints(request, "request");
  const IndexTableArgument table = read.table(positions, "positions");
  const auto [rows, columns] = std::pair((*table).rows, (*table).columns);
  check(
      std::ssize(requests) == rows, "KeyShare: request must have ", rows, " values, got ",
      requests.size()
  );
  py::array_t<int32_t> found({rows, columns});
  int32_t* out = found.mutable_data();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < columns; ++k) {
      const int64_t position = (*table).at(i, k);
      if (position >= 0) check_position(self, requests[i], position, 1);
      *out++ =
          position < 0 ? -1 : narrow_to_int32(self.row_of(requests[i], position), "KeyShare: rows");
    }
  }
  return found;
}

/// The mask of a call, as the arguments of its parts.
struct MaskArgument {
  TensorArgument bits;
  std::vector<int64_t> first_byte, row_bits, first_position;

  RowMask operator*() const {
    const auto* flags = static_cast<const uint8_t*>(bits->data);
    return {
        .bits = {flags, static_cast<std::size_t>(bits->shape[0])},
        .first_byte = first_byte,
        .row_bits = row_bits,
        .first_position = first_position,
    };
  }
};

std::optional<MaskArgument> read_mask(const Arguments& read, py::handle mask) {
  if (mask.is_none()) return std::nullopt;
  const auto parts = py::cast<py::tuple>(mask);
  MaskArgument argument{
      .bits = read.tensor(parts[0], "bits"),
      .first_byte = read.ints(parts[1], "first_byte"),
      .row_bits = read.ints(parts[2], "row_bits"),
      .first_position = read.ints(parts[3], "first_position"),
  };
  const TensorView& bits = *argument.bits;
  check(
      bits.rank == 1 && bits.dtype == DType::uint8 && (bits.strides[0] == 1 || bits.shape[0] == 0),
      "sequence_call: bits must be contiguous uint8 in one dimension"
  );
  return argument;
}

/// The fields of a SequenceCall, or None.
py::object call(
    const KeyShare& self,
    const LocalPages& pages,
    py::handle request,
    py::handle position,
    py::handle causal,
    py::handle window,
    py::handle mask
) {
  const Arguments read("sequence_call");
  const std::vector<int64_t> requests = read.ints(request, "request");
  const std::vector<int64_t> positions = read.ints(position, "position");
  const std::optional<MaskArgument> shown = read_mask(read, mask);
  RowVisibility visibility{.causal = read.flag(causal, "causal"), .window = {}, .mask = {}};
  visibility.window = read.window(window, visibility.causal);
  if (shown) visibility.mask = **shown;
  const QueryRows rows{.request = requests, .position = positions};
  std::optional<SequenceCall> made = sequence_call(self, pages, rows, visibility);
  if (!made) return py::none();
  py::object ranges = py::none(), bits = py::none();
  if (made->key_ranges) ranges = own_array(std::move(*made->key_ranges));
  if (made->mask) bits = int_array(std::move(*made->mask));
  return py::make_tuple(
      own_array(std::move(made->rows)), own_array(std::move(made->q_lens)),
      own_array(std::move(made->kv_indptr)), own_array(std::move(made->kv_indices)),
      own_array(std::move(made->last_page_len)), own_array(std::move(made->requests)),
      own_array(std::move(made->first_key)), pages.page_size, ranges, bits
  );
}

}  // namespace

// The GIL stays held: these take microseconds.
void register_key_share(py::module_& module) {
  py::class_<BatchKeys, std::shared_ptr<BatchKeys>>(module, "BatchKeys", py::module_local())
      .def(py::init(&interleaved_keys))
      .def(py::init(&placed_keys))
      .def_property_readonly("num_ranks", &BatchKeys::num_ranks)
      .def_property_readonly("run_len", &BatchKeys::run_len)
      .def("held_rows", &rows_held)
      .def("scratch", &scratch_of);
  py::class_<LocalPages>(module, "LocalPages", py::module_local())
      .def(py::init(&make_local_pages))
      .def_readonly("page_size", &LocalPages::page_size)
      .def_property_readonly(
          "indptr",
          [](const py::object& self) {
            return int_view(std::span<const int64_t>(self.cast<const LocalPages&>().indptr), self);
          }
      )
      .def_property_readonly("ids", [](const py::object& self) {
        return int_view(std::span<const int64_t>(self.cast<const LocalPages&>().ids), self);
      });
  py::class_<KeyShare>(module, "KeyShare", py::module_local())
      .def(py::init(&make_share))
      .def("count_below", &count_below)
      .def("counts", &counts)
      .def("local_keys", &local_keys)
      .def("local_pages", &KeyShare::local_pages)
      .def("rows_of", &rows_of)
      .def("call", &call);
}

}  // namespace cpattn::bindings
