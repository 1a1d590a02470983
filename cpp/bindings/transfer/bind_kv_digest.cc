// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/int_arrays.h"
#include "bindings/module.h"
#include "cpattn/transfer/kv_digest.h"
#include "cpattn/transfer/registered_memory.h"

namespace py = pybind11;
using namespace py::literals;

namespace cpattn::bindings {
namespace {

/// The owners of a layout's memory, which must belong to this process.
std::vector<MemoryOwners> memory_of(const Arguments& read, const KVLayout& layout) {
  std::vector<uint64_t> addrs, sizes;
  for (const KVEntry& entry : layout.entries()) {
    addrs.push_back(entry.addr);
    sizes.push_back(entry.num_bytes);
  }
  return own_memory(read.function(), addrs, sizes);
}

/// A tuple for each buffer: layer, kind, draft flag, dtype, bytes of a row, rows, sums.
py::list run_digest(
    py::handle layout_argument,
    py::handle pages,
    py::handle start,
    py::handle first_token,
    py::handle num_tokens,
    py::handle block_tokens,
    py::handle peer_argument,
    py::handle num_threads
) {
  const Arguments read("digest");
  const auto& layout = read.value<KVLayout>(layout_argument, "layout");
  const auto* peer = read.optional_value<KVLayout>(peer_argument, "peer");
  const std::vector<int64_t> page_list = read.ints(pages, "pages");
  const KVTokenRange range = {
      .pages = page_list,
      .start = read.integer(start, "start"),
      .first_token = read.optional_integer(first_token, "first_token"),
      .num_tokens = read.optional_integer(num_tokens, "num_tokens"),
  };
  const auto block = read.optional_integer(block_tokens, "block_tokens");
  const int threads = read.threads(num_threads);
  const std::vector<MemoryOwners> owners = memory_of(read, layout);
  std::vector<KVEntryDigest> digests;
  {
    const Computation computation;
    digests = digest_kv(layout, range, block, peer, threads);
  }
  py::list out;
  for (KVEntryDigest& digest : digests) {
    const KVEntry& entry = *digest.entry;
    out.append(
        py::make_tuple(
            entry.layer_id, kv_kind_name(entry.kind), entry.is_draft, entry.dtype, digest.row_bytes,
            digest.num_rows, int_array(std::move(digest.sums))
        )
    );
  }
  return out;
}

}  // namespace

void register_kv_digest(py::module_& module) {
  module.def(
      "digest_kv", &run_digest, "layout"_a, "pages"_a, "start"_a, "first_token"_a, "num_tokens"_a,
      "block_tokens"_a, "peer"_a, "num_threads"_a
  );
}

}  // namespace cpattn::bindings
