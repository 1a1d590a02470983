// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <string>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/distributed/batch_pages.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

/// The new tokens of pages, out of the arguments of a method.
class TokensArgument {
 public:
  TokensArgument(const BatchPages& pages, py::handle q_lens, py::handle padding)
      : q_lens_(kRead.ints(q_lens, "q_lens")), padding_(kRead.integer(padding, "padding")) {
    kCheck(
        q_lens_.size() == pages.kv_lens.size(), "q_lens must be of ", pages.kv_lens.size(),
        " requests, got ", q_lens_.size()
    );
    for (std::size_t i = 0; i < q_lens_.size(); ++i) {
      kCheck(
          q_lens_[i] >= 0 && q_lens_[i] <= pages.kv_lens[i], "q_lens must be in [0, ",
          pages.kv_lens[i], "], got ", q_lens_[i], " at index ", i
      );
    }
    kCheck(padding_ >= 0, "padding must be >= 0, got ", padding_);
  }
  NewTokens operator*() const { return {.q_lens = q_lens_, .padding = padding_}; }

  static constexpr Arguments kRead{"BatchPages"};

 private:
  static constexpr CheckFor kCheck{"BatchPages"};
  std::vector<int64_t> q_lens_;
  int64_t padding_;
};

constexpr const Arguments& kRead = TokensArgument::kRead;

BatchPages make_pages(
    py::handle block_tables, py::handle kv_lens, py::handle page_size, const std::string& function
) {
  const IndexTableArgument table = kRead.table(block_tables, "block_tables");
  return read_batch_pages(
      function.c_str(), *table, kRead.ints(kv_lens, "kv_lens"),
      kRead.integer(page_size, "page_size")
  );
}

py::array tables(const BatchPages& self, py::handle padding) {
  const int64_t tokens = kRead.integer(padding, "padding");
  check(tokens >= 0, "BatchPages: padding must be >= 0, got ", tokens);
  PaddedTable table = padded_table(self, tokens);
  return int_array(std::move(table.values)).attr("reshape")(self.bs(), table.columns);
}

py::array slots(const BatchPages& self, py::handle q_lens, py::handle padding) {
  return int_array(new_slots(self, *TokensArgument(self, q_lens, padding)));
}

/// Request and position of each new token, at its place in `rows`, or in the order of the tokens.
py::tuple rows(const BatchPages& self, py::handle q_lens, py::handle padding, py::handle places) {
  const TokensArgument tokens(self, q_lens, padding);
  TokenRows rows = token_rows(self, *tokens, kRead.optional_ints(places, "rows"));
  return py::make_tuple(own_array(std::move(rows.request)), own_array(std::move(rows.position)));
}

/// The digest of slots; None stands for the slots of the pages.
int64_t checked_slots(
    const BatchPages& self,
    py::handle given,
    py::handle q_lens,
    py::handle padding,
    const std::string& function
) {
  const TokensArgument tokens(self, q_lens, padding);
  if (given.is_none()) {
    refuse_shared_slots(function.c_str(), self, *tokens);
    return 0;
  }
  const std::vector<int64_t> values = kRead.ints(given, "out_cache_loc");
  return std::bit_cast<int64_t>(check_slots(function.c_str(), self, *tokens, values));
}

bool caches_new(const BatchPages& self, py::handle q_lens) {
  return caches_new_tokens(self, *TokensArgument(self, q_lens, py::int_(0)));
}

py::array view(const py::object& self, const std::vector<int64_t>& values) {
  return int_view(std::span<const int64_t>(values), self);
}

}  // namespace

// The GIL stays held: these take microseconds.
void register_batch_pages(py::module_& module) {
  py::class_<BatchPages, std::shared_ptr<BatchPages>>(module, "BatchPages", py::module_local())
      .def(py::init(&make_pages))
      .def_readonly("page_size", &BatchPages::page_size)
      .def_property_readonly(
          "kv_lens",
          [](const py::object& self) { return view(self, self.cast<const BatchPages&>().kv_lens); }
      )
      .def_property_readonly(
          "indptr",
          [](const py::object& self) { return view(self, self.cast<const BatchPages&>().indptr); }
      )
      .def_property_readonly(
          "ids",
          [](const py::object& self) {
            return int_view(std::span<const int32_t>(self.cast<const BatchPages&>().ids), self);
          }
      )
      .def("tables", &tables)
      .def("slots", &slots)
      .def("rows", &rows)
      .def("checked_slots", &checked_slots)
      .def("caches_new_tokens", &caches_new)
      .def("digest", [](const BatchPages& self) {
        return std::bit_cast<int64_t>(digest_of(self.ids));
      });
}

}  // namespace cpattn::bindings
