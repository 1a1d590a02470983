// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <vector>

#include "c/call.h"
#include "cpattn/base/kv_axis_order.h"
#include "cpattn/transfer/kv_digest.h"

namespace cpattn::c {

template <>
struct Defaults<cpattn_kv_digest> {
  static constexpr std::size_t kFirstSize = 152;
  static cpattn_kv_digest value() {
    return {
        .struct_size = sizeof(cpattn_kv_digest),
        .kind = "k",
        .kv_layout = "NHD",
        .first_token = CPATTN_NONE,
        .num_tokens = CPATTN_NONE,
        .block_tokens = 64,
        .tp_size = 1,
        .total_kv_heads = CPATTN_NONE,
        .dcp_size = 1,
        .dcp_interleave = 1,
        .shard_size = 1,
        .num_threads = CPATTN_NONE,
    };
  }
};

namespace {

constexpr Call kCall("digest");

/// The pages of a tensor: each is contiguous, and they may lie apart.
KVEntry entry_of(const cpattn_kv_digest& given, const TensorView& tensor) {
  int64_t elements = 1;
  bool contiguous = true;
  for (int axis = tensor.rank - 1; axis > 0; --axis) {
    contiguous &= tensor.shape[axis] == 1 || tensor.strides[axis] == elements;
    elements *= tensor.shape[axis];
  }
  const int64_t size = element_size(tensor.dtype), num_pages = tensor.dim(0);
  const int64_t stride = num_pages > 1 ? tensor.stride(0) : elements;
  check(
      contiguous && elements > 0 && stride >= elements, kCall.function(),
      ": pages of tensor must have bytes, be contiguous and lie apart, got shape ", ShapeOf{tensor}
  );
  KVEntry entry;
  entry.layer_id = given.layer_id;
  entry.kind = parse_kv_kind(kCall.function(), kCall.text(given.kind, "kind"));
  entry.is_draft = kCall.flag(given.is_draft, "is_draft");
  entry.addr = reinterpret_cast<uintptr_t>(tensor.data);
  entry.item_len = elements * size;
  entry.num_bytes = num_pages == 0 ? 0 : ((num_pages - 1) * stride + elements) * size;
  if (stride > elements) entry.page_stride = stride * size;
  entry.kv_layout = parse_kv_layout(kCall.function(), kCall.text(given.kv_layout, "kv_layout"));
  return entry;
}

KVPlacement placement_of(const cpattn_kv_digest& given, const TensorView& tensor) {
  const bool heads_first = std::string_view(given.kv_layout) == "HND";
  return {
      .page_size = tensor.dim(heads_first ? 2 : 1),
      .tp_rank = given.tp_rank,
      .tp_size = given.tp_size,
      .total_kv_heads = Call::optional_int(given.total_kv_heads),
      .layers = {},
      .dcp_rank = given.dcp_rank,
      .dcp_size = given.dcp_size,
      .dcp_interleave = given.dcp_interleave,
      .shard_rank = given.shard_rank,
      .shard_size = given.shard_size,
  };
}

}  // namespace
}  // namespace cpattn::c

using cpattn::c::guarded;
using cpattn::c::kCall;

cpattn_status cpattn_kv_digest_init(cpattn_kv_digest* digest, size_t struct_size) {
  return guarded([&] {
    cpattn::c::Call("kv_digest_init").initialise(digest, struct_size, "digest");
  });
}

cpattn_status cpattn_digest(
    const cpattn_kv_digest* digest, uint64_t* sums, int64_t num_sums, int64_t* num_rows
) {
  return guarded([&] {
    const cpattn_kv_digest given = kCall.options(digest, "digest");
    const cpattn::TensorView tensor = kCall.tensor(given.tensor, "tensor");
    cpattn::check(
        tensor.rank == 4, kCall.function(),
        ": tensor must have 4 dimensions [num_pages, page_size, num_kv_heads, dim], got shape ",
        cpattn::ShapeOf{tensor}
    );
    const cpattn::KVEntry entry = cpattn::c::entry_of(given, tensor);
    const cpattn::KVLayout layout({entry}, cpattn::c::placement_of(given, tensor));
    const std::vector<int64_t> pages = kCall.ints(given.pages, "pages");
    const cpattn::KVTokenRange range{
        .pages = pages,
        .start = given.start,
        .first_token = cpattn::c::Call::optional_int(given.first_token),
        .num_tokens = cpattn::c::Call::optional_int(given.num_tokens),
    };
    const int threads = kCall.threads(given.num_threads);
    cpattn::check(
        given.block_tokens >= 1, kCall.function(), ": block_tokens must be >= 1, got ",
        given.block_tokens
    );
    const auto found = cpattn::digest_kv(layout, range, given.block_tokens, nullptr, threads);
    const cpattn::KVEntryDigest& only = found.at(0);
    cpattn::check(
        num_sums == std::ssize(only.sums), kCall.function(), ": num_sums must be ",
        only.sums.size(), ", one for each block of ", given.block_tokens, " positions, got ",
        num_sums
    );
    uint64_t& first = kCall.object(sums, "sums");
    std::copy(only.sums.begin(), only.sums.end(), &first);
    if (num_rows != nullptr) *num_rows = only.num_rows;
  });
}
