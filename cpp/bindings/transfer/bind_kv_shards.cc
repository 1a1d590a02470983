// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/transfer/kv_shards.h"

namespace py = pybind11;

namespace cpattn::bindings {
namespace {

py::tuple shard_pages(
    py::handle kv_indices,
    py::handle start,
    py::handle stop,
    py::handle shard_rank,
    py::handle shard_size
) {
  const Arguments read("filter_kv_indices_for_shard_rank");
  const std::vector<int64_t> pages = read.ints(kv_indices, "kv_indices");
  const int64_t begin = read.integer(start, "index_slice.start");
  const int64_t end = read.integer(stop, "index_slice.stop");
  const int64_t rank = read.integer(shard_rank, "shard_rank");
  KVShardPages owned = filter_kv_indices_for_shard_rank(
      pages, {begin, end}, rank, read.integer(shard_size, "shard_size")
  );
  return py::make_tuple(int_array(std::move(owned.pages)), int_array(std::move(owned.positions)));
}

py::tuple cp_pages(
    int64_t num_pages,
    py::handle start,
    py::handle stop,
    py::handle total_pages,
    py::handle cp_rank,
    py::handle cp_size
) {
  const Arguments read("filter_kv_indices_for_cp_rank");
  const int64_t begin = read.integer(start, "index_slice.start");
  const auto end = read.optional_integer(stop, "index_slice.stop");
  const int64_t total = read.integer(total_pages, "total_pages");
  const int64_t rank = read.integer(cp_rank, "attn_cp_rank");
  const IndexRange pages = filter_kv_indices_for_cp_rank(
      num_pages, begin, end, total, rank, read.integer(cp_size, "attn_cp_size")
  );
  return py::make_tuple(pages.begin, pages.end);
}

py::tuple layer_range(py::handle rank, py::handle shard_size, py::handle total_layers) {
  const Arguments read("get_layer_shard_range");
  const int64_t of = read.integer(rank, "rank");
  const int64_t size = read.integer(shard_size, "shard_size");
  const IndexRange layers =
      get_layer_shard_range(of, size, read.integer(total_layers, "total_layers"));
  return py::make_tuple(layers.begin, layers.end);
}

int64_t layer_owner(py::handle local_layer_idx, py::handle shard_size, py::handle total_layers) {
  const Arguments read("get_layer_owner");
  const int64_t layer = read.integer(local_layer_idx, "local_layer_idx");
  const int64_t size = read.integer(shard_size, "shard_size");
  return get_layer_owner(layer, size, read.integer(total_layers, "total_layers"));
}

}  // namespace

void register_kv_shards(py::module_& module) {
  module.def("filter_kv_indices_for_shard_rank", &shard_pages);
  module.def("filter_kv_indices_for_cp_rank", &cp_pages);
  module.def("get_layer_shard_range", &layer_range);
  module.def("get_layer_owner", &layer_owner);
}

}  // namespace cpattn::bindings
