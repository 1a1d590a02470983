// SPDX-License-Identifier: Apache-2.0
#include "ops/kv/row_writer.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

bool is_float8(DType dtype) { return dtype == DType::float8_e4m3fn || dtype == DType::float8_e5m2; }

bool is_copied(DType from, DType to) {
  return from == to || (from == DType::uint8 && is_float8(to));
}

/// The largest number of a dtype of codes or scales.
float largest_number(DType dtype) {
  switch (dtype) {
    case DType::float8_e4m3fn:
      return 448;
    case DType::float8_e5m2:
      return 57344;
    case DType::int8:
      return 127;
    case DType::float16:
      return 65504;
    case DType::bfloat16:
      return 0x1.fep127F;
    default:
      return 0x1.fffffep127F;
  }
}

}  // namespace

RowCast row_cast(
    const char* function, const char* name, DType from, const char* to_name, DType to
) {
  if (is_copied(from, to)) return nullptr;
  const auto& casts = active_sparse_kernels().scatter.cast[element_type(function, name, from)];
  if (to == DType::float8_e4m3fn) return casts[kernels::kCastFloat8];
  if (to == DType::float8_e5m2) return casts[kernels::kCastFloat8E5M2];
  if (to == DType::int8) return casts[kernels::kCastInt8];
  return casts[element_type(function, to_name, to)];
}

Runs::Runs(const TensorView& tensor)
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

const char* Runs::at(int64_t offset) const {
  int64_t run = offset / run_bytes_;
  const char* address = data_ + offset % run_bytes_;
  for (int i = 0; i + 1 < rank_; ++i) {
    address += run % sizes_[i] * strides_[i];
    run /= sizes_[i];
  }
  return rank_ == 0 ? address : address + run * strides_[rank_ - 1];
}

RowWriter::RowWriter(const char* function, int64_t layer, int64_t num_rows, const KVRows& part)
    : function_(function),
      cast_(row_cast(function, part.name, part.rows.dtype, "the pool", part.buffer.dtype())),
      stream_(active_sparse_kernels().scatter.stream),
      runs_(part.rows),
      layer_(part.buffer.data() + layer * part.buffer.layer_bytes()),
      row_elements_(part.buffer.row_elements()),
      head_elements_(row_elements_),
      from_bytes_(element_size(part.rows.dtype)),
      to_bytes_(element_size(part.buffer.dtype())),
      nan_code_(is_float8(part.buffer.dtype()) ? 0x7f : 0),
      head_scales_{static_cast<float>(part.scale)} {
  check_tensor(function, part.name, part.rows, part.rows.rank);
  check(
      part.rows.num_elements() == num_rows * row_elements_, function, ": ", part.name,
      " must have ", num_rows, " * ", row_elements_, " = ", num_rows * row_elements_,
      " elements, a row per slot, got ", part.rows.num_elements(), " in shape ", ShapeOf{part.rows}
  );
  check_scales(function, num_rows, part);
  if (part.scale_buffer != nullptr) {
    set_scales(function, layer, part);
  } else if (part.scales) {
    head_elements_ = row_elements_ / part.num_heads;
    head_scales_.resize(part.num_heads);
    for (int64_t head = 0; head < part.num_heads; ++head) {
      head_scales_[head] = part.scales->as<float>()[head * part.scales->strides[0]];
    }
  }
  piece_elements_ = std::gcd(head_elements_, runs_.run_bytes() / from_bytes_);
}

void RowWriter::check_scales(const char* function, int64_t num_rows, const KVRows& part) {
  const std::string name = concat(part.name, "_scale");
  check_scale(function, name.c_str(), part.scale);
  if (part.scale_buffer == nullptr) {
    if (!part.scales) return;
    check_dtype(function, name.c_str(), part.scales->dtype, DType::float32);
    check_shape(function, name.c_str(), *part.scales, {part.num_heads});
    for (int64_t head = 0; head < part.num_heads; ++head) {
      check_scale(
          function, concat(name, "[", head, "]").c_str(),
          part.scales->as<float>()[head * part.scales->strides[0]]
      );
    }
    return;
  }
  const DType dtype = part.scale_buffer->dtype();
  if (cast_ != nullptr) {
    check(
        !part.scales && part.scale == 1, function, ": ", name,
        " must be None: the pool keeps scales of each token and head, which the write computes"
    );
    return;
  }
  check(
      part.scales.has_value(), function, ": ", name, " must be given with codes: ", num_rows, " * ",
      part.num_heads, " scales of ", dtype, ", one for each token and head"
  );
  check_dtype(function, name.c_str(), part.scales->dtype, dtype);
  check_tensor(function, name.c_str(), *part.scales, part.scales->rank);
  check(
      part.scales->num_elements() == num_rows * part.num_heads, function, ": ", name, " must have ",
      num_rows, " * ", part.num_heads, " = ", num_rows * part.num_heads,
      " elements, one for each token and head, got ", part.scales->num_elements(), " in shape ",
      ShapeOf{*part.scales}
  );
}

void RowWriter::set_scales(const char* function, int64_t layer, const KVRows& part) {
  assert(row_elements_ % part.num_heads == 0);
  const KVBuffer& buffer = *part.scale_buffer;
  Scales scales = {
      .layer = buffer.data() + layer * buffer.layer_bytes(),
      .num_heads = part.num_heads,
      .bytes = element_size(buffer.dtype()),
  };
  if (cast_ == nullptr) {
    scales.given = Runs(*part.scales);
  } else {
    head_elements_ = row_elements_ / part.num_heads;
    const auto& kernels = active_sparse_kernels().scatter;
    const kernels::ElementType type = element_type(function, "the pool's scales", buffer.dtype());
    scales.code_limit = largest_number(part.buffer.dtype());
    scales.type_limit = largest_number(buffer.dtype());
    scales.narrow = kernels.cast[kernels::kFloat32][type];
    scales.widen = kernels.cast[type][kernels::kFloat32];
    scales.largest = kernels.largest[element_type(function, part.name, part.rows.dtype)];
  }
  computed_ = scales;
}

bool RowWriter::can_stream() const {
  return piece_elements_ * to_bytes_ % kernels::kStreamBytes == 0;
}

float RowWriter::largest_of(int64_t first) const {
  float largest = 0;
  for (int64_t i = 0; i < head_elements_; i += piece_elements_) {
    const float some = computed_->largest(runs_.at((first + i) * from_bytes_), piece_elements_);
    if (std::isnan(some)) return some;
    largest = std::max(largest, some);
  }
  return largest;
}

/// Writes the scales of a row, and returns the stored numbers.
void RowWriter::write_scales(int64_t row, int64_t slot, float* scales) const {
  const int64_t num_heads = computed_->num_heads;
  char* const to = computed_->layer + slot * num_heads * computed_->bytes;
  for (int64_t head = 0; head < num_heads; ++head) {
    const float largest = largest_of(row * row_elements_ + head * head_elements_);
    const float scale = std::min(largest / computed_->code_limit, computed_->type_limit);
    scales[head] = scale < 0x1p-126F ? 0 : scale;
  }
  computed_->narrow(scales, num_heads, 1, to);
  computed_->widen(to, num_heads, 1, scales);
}

template <bool kStream>
void RowWriter::write(int64_t row, int64_t slot) const {
  const int64_t first = row * row_elements_;
  const float* scales = head_scales_.data();
  if (computed_ && computed_->given) {
    const int64_t row_bytes = computed_->num_heads * computed_->bytes;
    char* const to = computed_->layer + slot * row_bytes;
    const int64_t piece = std::gcd(row_bytes, computed_->given->run_bytes());
    for (int64_t i = 0; i < row_bytes; i += piece) {
      std::memcpy(to + i, computed_->given->at(row * row_bytes + i), piece);
    }
  } else if (computed_) {
    // Threads write whole rows, so that codes and scales of a slot come from one row.
    auto* const room =
        static_cast<float*>(thread_scratch(function_, computed_->num_heads * sizeof(float)));
    write_scales(row, slot, room);
    scales = room;
  }
  char* to = layer_ + slot * row_elements_ * to_bytes_;
  for (int64_t i = 0; i < row_elements_; i += piece_elements_) {
    const char* from = runs_.at((first + i) * from_bytes_);
    write_piece<kStream>(from, scales[i / head_elements_], to + i * to_bytes_);
  }
}

template void RowWriter::write<false>(int64_t row, int64_t slot) const;
template void RowWriter::write<true>(int64_t row, int64_t slot) const;

template <bool kStream>
void RowWriter::write_piece(const char* from, float scale, char* to) const {
  const int64_t bytes = piece_elements_ * to_bytes_;
  if (cast_ == nullptr) {
    kStream ? stream_(from, bytes, to) : static_cast<void>(std::memcpy(to, from, bytes));
  } else if (!(scale > 0)) {  // of 0 or NaN
    std::memset(to, std::isnan(scale) ? nan_code_ : 0, bytes);
  } else if (!kStream) {
    cast_(from, piece_elements_, scale, to);
  } else {
    constexpr int64_t kChunk = 256;
    alignas(64) char chunk[kChunk * sizeof(float)];
    for (int64_t i = 0; i < piece_elements_; i += kChunk) {
      const int64_t n = std::min(kChunk, piece_elements_ - i);
      cast_(from + i * from_bytes_, n, scale, chunk);
      stream_(chunk, n * to_bytes_, to + i * to_bytes_);
    }
  }
}

}  // namespace cpattn
