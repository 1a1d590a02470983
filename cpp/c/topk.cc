// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/topk.h"

#include <optional>

#include "c/call.h"

namespace cpattn::c {

template <>
struct Defaults<cpattn_topk_options> {
  static constexpr std::size_t kFirstSize = 104;
  static cpattn_topk_options value() {
    return {
        .struct_size = sizeof(cpattn_topk_options),
        .method = CPATTN_NONE,
        .page_size = 1,
        .sorted = 1,
    };
  }
};

}  // namespace cpattn::c

using cpattn::c::Call;
using cpattn::c::guarded;

cpattn_status cpattn_topk_options_init(cpattn_topk_options* options, size_t struct_size) {
  return guarded([&] { Call("topk_options_init").initialise(options, struct_size, "options"); });
}

cpattn_status cpattn_topk_transform(const cpattn_topk_options* options) {
  return guarded([&] {
    constexpr Call call("topk_transform");
    const cpattn_topk_options given = call.options(options, "options");
    const auto method =
        cpattn::parse_topk_transform_method(call.function(), Call::optional_int(given.method));
    const auto lengths = call.ints(given.lengths, "lengths");
    const auto row_starts = call.optional_ints(given.row_starts, "row_starts");
    const auto offsets = call.optional_ints(given.topk_indices_offset, "topk_indices_offset");
    const auto indptr = call.optional_ints(given.cu_seqlens_q, "cu_seqlens_q");
    const auto rows = call.optional_ints(given.batch_idx_list, "batch_idx_list");
    std::optional<cpattn::TopkSlots> slots;
    if (given.page_table != nullptr) {
      slots = {
          .table = {call.table(given.page_table, "page_table"), given.page_size},
          .cu_seqlens_q = indptr,
          .batch_idx_list = rows,
      };
    }
    cpattn::check(
        given.method != CPATTN_TOPK_RAGGED || offsets, call.function(),
        ": topk_indices_offset must be given for CPATTN_TOPK_RAGGED"
    );
    const cpattn::TopkArguments arguments{
        .function = call.function(),
        .score = call.tensor(given.logits, "logits"),
        .lengths = lengths,
        .row_starts = row_starts,
        .topk = given.topk,
        .sorted = call.flag(given.sorted, "sorted"),
        .score_name = "logits",
    };
    cpattn::topk_transform(arguments, method, slots, offsets, call.output(given.out, "out"));
  });
}
