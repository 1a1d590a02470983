// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/context_parallel/exchanges.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

using Shares = std::vector<HeadShare>;

py::slice slice_of(const HeadRange& heads) {
  return {py::int_(heads.begin), py::int_(heads.end), py::none()};
}

py::list rounds_of(
    py::handle num_kv_heads,
    py::handle received_bytes,
    py::handle flops,
    py::handle most_rounds,
    py::handle least_bytes,
    py::handle most_flops_per_byte,
    py::handle most_heads
) {
  const Arguments read("head_rounds");
  const RoundLimits limits{
      .most_rounds = read.integer(most_rounds, "most_rounds"),
      .least_bytes = read.integer(least_bytes, "least_bytes"),
      .most_flops_per_byte = read.real(most_flops_per_byte, "most_flops_per_byte"),
      .most_heads = read.optional_integer(most_heads, "most_heads"),
  };
  py::list rounds;
  for (const HeadRange& heads : head_rounds(
           read.integer(num_kv_heads, "num_kv_heads"),
           read.integer(received_bytes, "received_bytes"), read.real(flops, "flops"), limits
       )) {
    rounds.append(slice_of(heads));
  }
  return rounds;
}

LayerBytes make_layer(
    py::handle num_heads,
    py::handle num_kv_heads,
    py::handle query,
    py::handle key,
    py::handle output,
    py::handle merged
) {
  const Arguments read("LayerBytes");
  return {
      .num_heads = read.integer(num_heads, "num_heads"),
      .num_kv_heads = read.integer(num_kv_heads, "num_kv_heads"),
      .query = read.integer(query, "query"),
      .key = read.integer(key, "key"),
      .output = read.integer(output, "output"),
      .merged = read.integer(merged, "merged"),
  };
}

HeldRows make_held(
    py::handle tokens, py::handle keys, py::handle seen, py::handle new_keys, py::handle arriving
) {
  const Arguments read("HeldRows");
  return {
      .tokens = read.ints(tokens, "tokens"),
      .keys = read.ints(keys, "keys"),
      .seen = read.ints(seen, "seen"),
      .new_keys = read.ints(new_keys, "new_keys"),
      .arriving = read.ints(arriving, "arriving"),
  };
}

py::tuple arrays_of(Traffic moved) {
  return py::make_tuple(own_array(std::move(moved.sent)), own_array(std::move(moved.received)));
}

py::tuple arrays_of(RoundTrip moved) {
  return arrays_of(std::move(moved.before)) + arrays_of(std::move(moved.after));
}

py::tuple rows_sent(py::handle rows, py::handle row_bytes, py::handle by_ring) {
  const Arguments read("send_rows");
  return arrays_of(send_rows(
      read.ints(rows, "rows"), read.integer(row_bytes, "row_bytes"), read.flag(by_ring, "by_ring")
  ));
}

py::tuple queries_sent(py::handle tokens, py::handle query_bytes, py::handle state_bytes) {
  const Arguments read("send_queries");
  return arrays_of(send_queries(
      read.ints(tokens, "tokens"), read.integer(query_bytes, "query_bytes"),
      read.integer(state_bytes, "state_bytes")
  ));
}

py::tuple sent_by_heads(
    py::handle tokens,
    py::handle keys,
    const LayerBytes& layer,
    py::handle heads,
    py::handle kv_heads,
    py::handle result_bytes
) {
  const Arguments read("send_by_heads");
  const std::vector<int64_t> queries = read.ints(tokens, "tokens"), rows = read.ints(keys, "keys"),
                             taken = read.ints(heads, "heads"),
                             taken_kv = read.ints(kv_heads, "kv_heads");
  check(
      rows.size() == queries.size() && taken.size() == queries.size() &&
          taken_kv.size() == queries.size(),
      "send_by_heads: tokens, keys, heads and kv_heads must be of equal ranks"
  );
  return arrays_of(send_by_heads(
      queries, rows, layer, taken, taken_kv, read.integer(result_bytes, "result_bytes")
  ));
}

py::dict all_exchanges() {
  py::dict named;
  for (const Exchange& exchange : exchanges()) {
    named[exchange.name] = py::cast(exchange, py::return_value_policy::copy);
  }
  return named;
}

/// The fields of an ExchangeChoice.
py::tuple fields_of(const ExchangeChoice& choice) {
  py::dict received;
  for (const auto& [name, bytes] : choice.received) received[name.c_str()] = bytes;
  return py::make_tuple(choice.exchange, choice.reason, received);
}

py::tuple chosen(
    const HeldRows& held,
    const LayerBytes& layer,
    py::handle mesh,
    py::handle writes,
    py::handle max_scratch_bytes
) {
  const Arguments read("choose_exchange");
  ExchangedLayer exchanged{
      .held = held, .layer = layer, .writes = read.flag(writes, "writes"), .mesh = {}
  };
  if (const auto table = read.optional_table(mesh, "mesh")) {
    for (int64_t row = 0; row < (**table).rows; ++row) {
      exchanged.mesh.emplace_back();
      for (int64_t column = 0; column < (**table).columns; ++column) {
        exchanged.mesh.back().push_back((**table).at(row, column));
      }
    }
  }
  return fields_of(
      choose_exchange(exchanged, read.integer(max_scratch_bytes, "max_scratch_bytes"))
  );
}

py::tuple chosen_states(
    py::handle num_tokens,
    py::handle num_heads,
    py::handle output_bytes,
    py::handle num_ranks,
    py::handle all_heads
) {
  const Arguments read("choose_state_exchange");
  return fields_of(choose_state_exchange(
      read.integer(num_tokens, "num_tokens"), read.integer(num_heads, "num_heads"),
      read.integer(output_bytes, "output_bytes"), read.integer(num_ranks, "num_ranks"),
      read.flag(all_heads, "all_heads")
  ));
}

py::tuple chosen_sparse(
    py::handle keys,
    py::handle rows_per_rank,
    py::handle visible,
    py::handle sizes,
    py::handle max_scratch_bytes
) {
  const Arguments read("choose_sparse_exchange");
  const std::vector<int64_t> bytes = read.ints(sizes, "sizes");
  check(bytes.size() == 6, "choose_sparse_exchange: sizes must be six, got ", bytes.size());
  const std::vector<int64_t> held = read.ints(keys, "keys"),
                             rows = read.ints(rows_per_rank, "rows_per_rank"),
                             seen = read.ints(visible, "visible");
  const SparseBytes layer{
      .topk = bytes[0],
      .query = bytes[1],
      .result = bytes[2],
      .asking = bytes[3],
      .latent = bytes[4],
      .index_key = bytes[5],
  };
  return fields_of(choose_sparse_exchange(
      held, rows, seen, layer, read.integer(max_scratch_bytes, "max_scratch_bytes")
  ));
}

}  // namespace

// The GIL stays held: these take microseconds.
void register_exchanges(py::module_& module) {
  py::class_<HeadShare>(module, "HeadShare", py::module_local())
      .def_property_readonly("q", [](const HeadShare& self) { return slice_of(self.q); })
      .def_property_readonly("kv", [](const HeadShare& self) { return slice_of(self.kv); })
      .def_property_readonly("num_heads", [](const HeadShare& self) { return self.q.size(); })
      .def_property_readonly("num_kv_heads", [](const HeadShare& self) { return self.kv.size(); });
  py::class_<LayerBytes>(module, "LayerBytes", py::module_local())
      .def(py::init(&make_layer))
      .def_readonly("num_heads", &LayerBytes::num_heads)
      .def_readonly("num_kv_heads", &LayerBytes::num_kv_heads)
      .def_readonly("query", &LayerBytes::query)
      .def_readonly("key", &LayerBytes::key)
      .def_readonly("output", &LayerBytes::output)
      .def_readonly("merged", &LayerBytes::merged);
  py::class_<HeldRows>(module, "HeldRows", py::module_local())
      .def(py::init(&make_held))
      .def_property_readonly("num_ranks", [](const HeldRows& self) { return self.tokens.size(); });
  py::class_<Exchange>(module, "Exchange", py::module_local())
      .def_readonly("needs_mesh", &Exchange::needs_mesh)
      .def_readonly("needs_even_heads", &Exchange::needs_even_heads)
      .def_readonly("needs_shards", &Exchange::needs_shards)
      .def_readonly("reads_in_place", &Exchange::reads_in_place)
      .def_readonly("writes", &Exchange::writes)
      .def_readonly("rounds_twice", &Exchange::rounds_twice)
      .def_readonly("sends_wanted_lse", &Exchange::sends_wanted_lse);
  module.attr("LSE_BYTES") = kLseBytes;
  module.def("exchanges", &all_exchanges);
  module.def("share_heads", [](py::handle num_heads, py::handle num_kv_heads, py::handle ranks) {
    const Arguments read("share_heads");
    return share_heads(
        read.integer(num_heads, "num_heads"), read.integer(num_kv_heads, "num_kv_heads"),
        read.integer(ranks, "num_ranks")
    );
  });
  module.def("split_shares", [](const Shares& shares, py::handle num_parts) {
    return split_shares(shares, Arguments("split_shares").integer(num_parts, "num_parts"));
  });
  module.def("head_rounds", &rounds_of);
  module.def("send_rows", &rows_sent);
  module.def("send_queries", &queries_sent);
  module.def("send_by_heads", &sent_by_heads);
  module.def("choose_exchange", &chosen);
  module.def("choose_state_exchange", &chosen_states);
  module.def("choose_sparse_exchange", &chosen_sparse);
}

}  // namespace cpattn::bindings
