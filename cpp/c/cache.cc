// SPDX-License-Identifier: Apache-2.0
#include "c/call.h"
#include "cpattn/base/kv_axis_order.h"
#include "cpattn/kv/page_rows.h"

namespace cpattn::c {

template <>
struct Defaults<cpattn_page_writes> {
  static constexpr std::size_t kFirstSize = 72;
  static cpattn_page_writes value() {
    return {
        .struct_size = sizeof(cpattn_page_writes), .kv_layout = "NHD", .k_scale = 1, .v_scale = 1
    };
  }
};

}  // namespace cpattn::c

using cpattn::c::Call;
using cpattn::c::guarded;

cpattn_status cpattn_page_writes_init(cpattn_page_writes* writes, size_t struct_size) {
  return guarded([&] { Call("page_writes_init").initialise(writes, struct_size, "writes"); });
}

cpattn_status cpattn_write_pages(const cpattn_page_writes* writes) {
  return guarded([&] {
    constexpr Call call("write_pages");
    const cpattn_page_writes given = call.options(writes, "writes");
    auto slots = call.ints(given.slots, "slots");
    const auto order =
        cpattn::parse_kv_layout(call.function(), call.text(given.kv_layout, "kv_layout"));
    const cpattn::PageRows parts[] = {
        {.name = "k",
         .pages_name = "k_pages",
         .scale_name = "k_scale",
         .rows = call.tensor(given.k, "k"),
         .pages = cpattn::heads_first(call.output(given.k_pages, "k_pages"), order),
         .scale = given.k_scale},
        {.name = "v",
         .pages_name = "v_pages",
         .scale_name = "v_scale",
         .rows = call.tensor(given.v, "v"),
         .pages = cpattn::heads_first(call.output(given.v_pages, "v_pages"), order),
         .scale = given.v_scale},
    };
    cpattn::write_page_rows(call.function(), slots, parts);
  });
}

cpattn_status cpattn_write_slots(
    const cpattn_tensor* slots, const cpattn_tensor* rows, const cpattn_tensor* cache, double scale
) {
  return guarded([&] {
    constexpr Call call("write_slots");
    auto slot_list = call.ints(slots, "slots");
    const cpattn::TensorView to = call.output(cache, "cache");
    cpattn::check(
        to.rank == 3, call.function(),
        ": cache must have 3 dimensions [slots, heads, dim], got shape ", cpattn::ShapeOf{to}
    );
    const cpattn::PageRows part{
        .name = "rows",
        .pages_name = "cache",
        .rows = call.tensor(rows, "rows"),
        .pages = cpattn::heads_first(to, cpattn::KVAxisOrder::nhd),
        .scale = scale,
    };
    cpattn::write_page_rows(call.function(), slot_list, {&part, 1});
  });
}
