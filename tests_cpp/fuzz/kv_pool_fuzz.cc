// SPDX-License-Identifier: Apache-2.0
// Buffers of KV pools, rows written to their slots, and who owns which memory.
#include "cpattn/kv/kv_pool.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "cpattn/kv/kv_scatter.h"
#include "cpattn/kv/pool_memory.h"
#include "fuzz/fuzz.h"
#include "fuzz/tensors.h"

namespace cpattn::fuzz {
namespace {

using Ints = std::vector<int64_t>;

constexpr DType kDTypes[] = {DType::float32,       DType::bfloat16,    DType::float16,
                             DType::float8_e4m3fn, DType::float8_e5m2, DType::int8,
                             DType::uint8};
constexpr DType kScaleDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

/// Nothing for sizes that are refused, or that no address space has.
std::unique_ptr<KVBuffer> make_buffer(
    int64_t layers, int64_t slots, int64_t elements, DType dtype
) {
  return accepted_but_for<std::bad_alloc>(
             [&] { return std::make_unique<KVBuffer>("fuzz", layers, slots, elements, dtype); }
  ).value_or(nullptr);
}

void check_sizes(Reader& in) {
  const int64_t layers = in.mostly(in.between(1, 3), 3), slots = in.mostly(in.between(1, 9), 3);
  const auto buffer = make_buffer(layers, slots, in.mostly(8, 3), in.one_of(kDTypes));
  if (!buffer) return;
  FUZZ_CHECK(layers >= 1 && slots >= 1 && buffer->num_bytes() >= layers * slots);
  FUZZ_CHECK(buffer->num_bytes() == layers * buffer->layer_bytes());
  const auto addr = reinterpret_cast<uint64_t>(buffer->data());
  const auto num_bytes = static_cast<uint64_t>(buffer->num_bytes());
  FUZZ_CHECK(PoolMemory::find(addr + num_bytes - 1, 1).size() == 1);
  FUZZ_CHECK(PoolMemory::find(addr, num_bytes).at(0)->contains(addr, num_bytes));
  FUZZ_CHECK(PoolMemory::find(addr, 0).empty());
}

/// Rows, often with gaps between them and in several axes.
Tensor read_rows(Reader& in, int64_t num_rows, int64_t row_elements, DType dtype) {
  Ints shape = {in.size_near(num_rows)};
  if (row_elements % 2 == 0 && in.flag()) shape.push_back(2);
  shape.push_back(in.size_near(shape.size() == 2 ? row_elements / 2 : row_elements));
  if (in.rarely(8)) shape.insert(shape.begin(), 1);
  Tensor rows(dtype, shape, &in, 3);
  rows.fill(in.bits(1));
  return rows;
}

/// The bytes of element i in row-major order.
const char* element(const TensorView& tensor, int64_t i) {
  int64_t offset = 0;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    offset += i % tensor.shape[axis] * tensor.strides[axis];
    i /= tensor.shape[axis];
  }
  return tensor.as<char>() + offset * element_size(tensor.dtype);
}

void check_writes(Reader& in) {
  const int64_t num_slots = in.between(1, 12), num_layers = in.between(1, 2);
  const DType dtype = in.one_of(kDTypes);
  const std::array<int64_t, 2> row_elements = {in.between(1, 40), in.one_of({1, 64, 6})};
  const auto k = make_buffer(num_layers, num_slots, row_elements[0], dtype);
  const auto v = make_buffer(num_layers, num_slots, row_elements[1], dtype);
  FUZZ_CHECK(k && v);
  const DType from = in.rarely(4) ? in.one_of(kDTypes) : dtype;
  Ints slots =
      in.list(in.between(0, 10), [&] { return in.mostly(in.between(-1, num_slots - 1), 128); });
  const Ints given = slots;
  const Tensor k_rows = read_rows(in, std::ssize(slots), row_elements[0], from);
  const Tensor v_rows = read_rows(in, std::ssize(slots), row_elements[1], from);
  const double scale = in.rarely() ? 0.0 : in.flag() ? 1.0 : 0.5;
  std::array<KVRows, 2> parts = {
      KVRows{.name = "k", .rows = k_rows.view(), .buffer = *k, .scale = scale},
      KVRows{.name = "v", .rows = v_rows.view(), .buffer = *v, .scale = scale},
  };
  // Scales of the heads of v, or of each token and head, in a dtype and number that may be wrong.
  const int64_t num_heads = row_elements[1] % 2 == 0 && in.flag() ? 2 : 1;
  const DType scale_dtype = in.one_of(kScaleDTypes);
  const auto v_scales = make_buffer(num_layers, num_slots, num_heads, scale_dtype);
  FUZZ_CHECK(v_scales != nullptr);
  const Ints num_scales = {in.flag() ? num_heads : std::ssize(slots) * num_heads};
  Tensor given_scales(in.rarely(4) ? DType::float32 : scale_dtype, num_scales, &in, 3);
  given_scales.fill(in.bits(1));
  parts[1].num_heads = num_heads;
  if (in.flag()) parts[1].scales = given_scales.view();
  if (in.flag()) parts[1].scale_buffer = v_scales.get();
  const int64_t layer = in.mostly(in.between(0, num_layers - 1));
  const bool written = accepted([&] {
                         write_kv_rows("fuzz", layer, slots, parts);
                         return true;
                       }).has_value();
  if (written) FUZZ_CHECK(layer >= 0 && layer < num_layers);
  for (const KVRows& part : parts) {
    const int64_t row_bytes = part.buffer.row_bytes();
    std::vector<char> expected(part.buffer.num_bytes(), 0);
    std::vector<bool> is_written(num_layers * num_slots, false);
    for (std::size_t row = 0; written && row < given.size(); ++row) {
      if (given[row] < 0) continue;
      FUZZ_CHECK(given[row] < num_slots);
      const int64_t slot = layer * num_slots + given[row];
      is_written[slot] = true;
      if (from != dtype) continue;
      const int64_t n = part.buffer.row_elements(), size = element_size(dtype);
      for (int64_t i = 0; i < n; ++i) {
        const char* value = element(part.rows, static_cast<int64_t>(row) * n + i);
        std::memcpy(expected.data() + slot * row_bytes + i * size, value, size);
      }
    }
    for (int64_t slot = 0; slot < num_layers * num_slots; ++slot) {
      if (is_written[slot] && from != dtype) continue;
      const int64_t offset = slot * row_bytes;
      FUZZ_CHECK(
          std::memcmp(part.buffer.data() + offset, expected.data() + offset, row_bytes) == 0
      );
    }
  }
}

}  // namespace

void run(Reader in) {
  constexpr void (*kChecks[])(Reader&) = {check_writes, check_writes, check_writes, check_sizes};
  in.one_of(kChecks)(in);
}

}  // namespace cpattn::fuzz
