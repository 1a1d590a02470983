// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/kv_scatter.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"
#include "ops/kv/row_writer.h"
#include "ops/kv/slots.h"

namespace cpattn {
namespace {

/// Checks that no rows or scales overlap written memory.
void check_no_overlap(
    const char* function, int64_t layer, std::span<const KVRows> parts, const KVRows& written
) {
  const auto check_buffer = [&](const KVBuffer& buffer, const std::string& name) {
    TensorView out{.data = buffer.data() + layer * buffer.layer_bytes(), .dtype = buffer.dtype()};
    out.rank = 1;
    out.shape[0] = buffer.num_slots() * buffer.row_elements();
    out.strides[0] = 1;
    for (const KVRows& read : parts) {
      cpattn::check_no_overlap(function, name.c_str(), out, read.name, read.rows);
      if (!read.scales) continue;
      cpattn::check_no_overlap(
          function, name.c_str(), out, concat(read.name, "_scale").c_str(), *read.scales
      );
    }
  };
  check_buffer(written.buffer, concat("the layer's ", written.name));
  if (written.scale_buffer != nullptr) {
    check_buffer(*written.scale_buffer, concat("the layer's ", written.name, "_scale"));
  }
}

template <bool kStream>
void write_rows(
    std::span<const RowWriter> writers, std::span<const int64_t> slots, int64_t begin, int64_t end
) {
  for (const RowWriter& writer : writers) {
    for (int64_t row = begin; row < end; ++row) {
      if (slots[row] >= 0) writer.write<kStream>(row, slots[row]);
    }
  }
  if constexpr (kStream) active_sparse_kernels().scatter.finish_stream();
}

}  // namespace

void write_kv_rows(
    const char* function, int64_t layer, std::span<int64_t> slots, std::span<const KVRows> parts
) {
  constexpr int64_t kLeastTraffic = int64_t{1} << 18;   // worth a thread
  constexpr int64_t kLeastStreamed = int64_t{1} << 24;  // not worth keeping in caches
  assert(!parts.empty());
  const KVBuffer& buffer = parts[0].buffer;
  check(
      layer >= 0 && layer < buffer.num_layers(), function, ": layer must be in [0, ",
      buffer.num_layers(), "), got ", layer
  );
  const auto num_rows = static_cast<int64_t>(slots.size());
  const bool ascending = check_slots(function, "loc", slots, buffer.num_slots());
  std::vector<RowWriter> writers;
  writers.reserve(2 * parts.size());
  int64_t traffic = 0, written = 0;
  bool can_stream = true;
  for (const KVRows& part : parts) {
    assert(part.buffer.num_slots() == buffer.num_slots());
    assert(part.scale_buffer == nullptr || part.scale_buffer->num_slots() == buffer.num_slots());
    const RowWriter& writer = writers.emplace_back(function, layer, num_rows, part);
    traffic += writer.traffic();
    written += writer.written();
    can_stream &= writer.can_stream();
    check_no_overlap(function, layer, parts, part);
  }
  const int64_t step = std::max<int64_t>(1, kLeastTraffic / traffic);
  if (num_rows > step && !ascending) keep_last(function, slots);
  const auto write =
      can_stream && num_rows * written >= kLeastStreamed ? &write_rows<true> : &write_rows<false>;
  parallel_for((num_rows + step - 1) / step, default_num_threads(), [&](int64_t item, StopToken&) {
    write(writers, slots, item * step, std::min(num_rows, (item + 1) * step));
  });
}

}  // namespace cpattn
