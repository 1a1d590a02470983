// SPDX-License-Identifier: Apache-2.0
#include "cpattn/kv/kv_scatter.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// A tensor as runs of bytes without gaps, in row-major order.
class Runs {
 public:
  explicit Runs(const TensorView& tensor)
      : data_(tensor.as<char>()), run_bytes_(element_size(tensor.dtype)) {
    const int64_t element_bytes = run_bytes_;
    for (int axis = tensor.rank - 1; axis >= 0; --axis) {
      const int64_t size = tensor.shape[axis], stride = tensor.strides[axis] * element_bytes;
      if (size == 1) continue;
      if (rank_ == 0 && stride == run_bytes_) {
        run_bytes_ *= size;
      } else {
        sizes_[rank_] = size;
        strides_[rank_++] = stride;
      }
    }
  }

  int64_t run_bytes() const { return run_bytes_; }

  /// The address of the byte `offset` of the elements in row-major order.
  const char* at(int64_t offset) const {
    int64_t run = offset / run_bytes_;
    const char* address = data_ + offset % run_bytes_;
    for (int i = 0; i + 1 < rank_; ++i) {
      address += run % sizes_[i] * strides_[i];
      run /= sizes_[i];
    }
    return rank_ == 0 ? address : address + run * strides_[rank_ - 1];
  }

 private:
  const char* data_;
  int64_t run_bytes_;
  int rank_ = 0;  // of what is outside a run, innermost first
  std::array<int64_t, TensorView::kMaxRank> sizes_{}, strides_{};
};

using Cast = void (*)(const void* x, int64_t n, float scale, void* out);

bool is_copied(DType from, DType to) {
  return from == to || (from == DType::uint8 && to == DType::float8_e4m3fn);
}

Cast cast_kernel(const char* function, const KVRows& part) {
  const DType from = part.rows.dtype, to = part.buffer.dtype();
  if (is_copied(from, to)) return nullptr;
  const auto& casts = active_sparse_kernels().scatter.cast[element_type(function, part.name, from)];
  if (to == DType::float8_e4m3fn) return casts[kernels::kCastFloat8];
  return casts[element_type(function, "the pool", to)];
}

/// One part, checked: rows in pieces that have no gaps.
class Writer {
 public:
  Writer(const char* function, int64_t layer, int64_t num_rows, const KVRows& part)
      : cast_(cast_kernel(function, part)),
        stream_(active_sparse_kernels().scatter.stream),
        scale_(static_cast<float>(part.scale)),
        runs_(part.rows),
        layer_(part.buffer.data() + layer * part.buffer.layer_bytes()),
        row_elements_(part.buffer.row_elements()),
        from_bytes_(element_size(part.rows.dtype)),
        to_bytes_(element_size(part.buffer.dtype())) {
    check_part(function, num_rows, part);
    piece_elements_ = std::gcd(row_elements_, runs_.run_bytes() / from_bytes_);
  }

  /// Bytes written for a row, and also read.
  int64_t written() const { return row_elements_ * to_bytes_; }
  int64_t traffic() const { return row_elements_ * (from_bytes_ + to_bytes_); }

  /// Whether pieces may go past the caches.
  bool can_stream() const { return piece_elements_ * to_bytes_ % kernels::kStreamBytes == 0; }

  template <bool kStream>
  void write(int64_t row, int64_t slot) const {
    const int64_t first = row * row_elements_;
    char* to = layer_ + slot * row_elements_ * to_bytes_;
    for (int64_t i = 0; i < row_elements_;
         i += piece_elements_, to += piece_elements_ * to_bytes_) {
      const char* from = runs_.at((first + i) * from_bytes_);
      if constexpr (kStream) {
        stream_piece(from, to);
      } else if (cast_ == nullptr) {
        std::memcpy(to, from, piece_elements_ * to_bytes_);
      } else {
        cast_(from, piece_elements_, scale_, to);
      }
    }
  }

 private:
  void check_part(const char* function, int64_t num_rows, const KVRows& part) const {
    check_tensor(function, part.name, part.rows, part.rows.rank);
    check(
        part.rows.num_elements() == num_rows * row_elements_, function, ": ", part.name,
        " must have ", num_rows, " * ", row_elements_, " = ", num_rows * row_elements_,
        " elements, a row per slot, got ", part.rows.num_elements(), " in shape ",
        ShapeOf{part.rows}
    );
    check_scale(function, concat(part.name, "_scale").c_str(), part.scale);
  }

  void stream_piece(const char* from, char* to) const {
    if (cast_ == nullptr) {
      stream_(from, piece_elements_ * to_bytes_, to);
      return;
    }
    constexpr int64_t kChunk = 256;
    alignas(64) char chunk[kChunk * sizeof(float)];
    for (int64_t i = 0; i < piece_elements_; i += kChunk) {
      const int64_t n = std::min(kChunk, piece_elements_ - i);
      cast_(from + i * from_bytes_, n, scale_, chunk);
      stream_(chunk, n * to_bytes_, to + i * to_bytes_);
    }
  }

  Cast cast_;  // null: rows are copied
  void (*stream_)(const void* from, int64_t bytes, void* to);
  float scale_;
  Runs runs_;
  char* layer_;
  int64_t row_elements_, from_bytes_, to_bytes_;
  int64_t piece_elements_ = 0;
};

/// Checks that no rows lie where any are written.
void check_no_overlap(const char* function, int64_t layer, std::span<const KVRows> parts) {
  for (const KVRows& written : parts) {
    const KVBuffer& buffer = written.buffer;
    TensorView out{.data = buffer.data() + layer * buffer.layer_bytes(), .dtype = buffer.dtype()};
    out.rank = 1;
    out.shape[0] = buffer.num_slots() * buffer.row_elements();
    out.strides[0] = 1;
    const std::string name = concat("the layer's ", written.name);
    for (const KVRows& read : parts) {
      cpattn::check_no_overlap(function, name.c_str(), out, read.name, read.rows);
    }
  }
}

/// Checks that slots are in the layer. Whether each is behind those before it, so that none comes
/// twice.
bool check_slots(const char* function, std::span<const int64_t> slots, int64_t num_slots) {
  bool ascending = true;
  int64_t last = -1;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const int64_t slot = slots[i];
    check(
        slot >= -1 && slot < num_slots, function, ": loc must be in [-1, ", num_slots, "), got ",
        slot, " at index ", i
    );
    if (slot < 0) continue;
    ascending &= slot > last;
    last = slot;
  }
  return ascending;
}

/// Replaces slots that come again by -1: what is written to the rest may be written in any order.
void keep_last(std::span<int64_t> slots) {
  const auto [low, high] = std::minmax_element(slots.begin(), slots.end());
  const int64_t first = std::max<int64_t>(*low, 0);
  const int64_t num_words = (*high - first) / 64 + 1;
  auto* const seen = static_cast<uint64_t*>(thread_scratch(num_words * sizeof(uint64_t)));
  std::fill_n(seen, num_words, 0);
  for (auto slot = slots.rbegin(); slot != slots.rend(); ++slot) {
    if (*slot < 0) continue;
    uint64_t& word = seen[(*slot - first) / 64];
    const uint64_t bit = uint64_t{1} << (*slot - first) % 64;
    if ((word & bit) != 0) *slot = -1;
    word |= bit;
  }
}

template <bool kStream>
void write_rows(
    std::span<const Writer> writers, std::span<const int64_t> slots, int64_t begin, int64_t end
) {
  for (const Writer& writer : writers) {
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
  const bool ascending = check_slots(function, slots, buffer.num_slots());
  std::vector<Writer> writers;
  writers.reserve(parts.size());
  int64_t traffic = 0, written = 0;
  bool can_stream = true;
  for (const KVRows& part : parts) {
    assert(part.buffer.num_slots() == buffer.num_slots());
    const Writer& writer = writers.emplace_back(function, layer, num_rows, part);
    traffic += writer.traffic();
    written += writer.written();
    can_stream &= writer.can_stream();
  }
  check_no_overlap(function, layer, parts);
  const int64_t step = std::max<int64_t>(1, kLeastTraffic / traffic);
  if (num_rows > step && !ascending) keep_last(slots);
  const auto write =
      can_stream && num_rows * written >= kLeastStreamed ? &write_rows<true> : &write_rows<false>;
  parallel_for((num_rows + step - 1) / step, default_num_threads(), [&](int64_t item, StopToken&) {
    write(writers, slots, item * step, std::min(num_rows, (item + 1) * step));
  });
}

}  // namespace cpattn
