// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "cpattn/base/index_table.h"
#include "cpattn/base/tensor_view.h"
#include "fuzz/fuzz.h"

namespace cpattn::fuzz {

/// A tensor in memory of just its size, so that AddressSanitizer sees any step beside it.
class Tensor {
 public:
  /// Rows of the outer axes may lie apart by up to `padding` elements more, as `in` says.
  Tensor(DType dtype, std::span<const int64_t> shape, Reader* in = nullptr, int64_t padding = 0) {
    view_.dtype = dtype;
    view_.writable = true;
    view_.rank = static_cast<int>(shape.size());
    int64_t stride = 1, last = 0;
    bool is_empty = false;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      view_.shape[axis] = shape[axis];
      view_.strides[axis] = stride;
      is_empty = is_empty || shape[axis] == 0;
      last += (shape[axis] - 1) * stride;
      stride *= shape[axis];
      if (padding > 0 && in->rarely(8)) stride += in->between(0, padding);
    }
    num_elements_ = is_empty ? 0 : last + 1;
    bytes_ = std::make_unique<char[]>(num_elements_ * element_size(dtype));
    view_.data = bytes_.get();
  }

  const TensorView& view() const { return view_; }
  /// Elements of the memory, those between rows included.
  int64_t num_elements() const { return num_elements_; }

  template <class T>
  std::span<T> as() {
    return {reinterpret_cast<T*>(bytes_.get()), static_cast<std::size_t>(num_elements_)};
  }

  /// Numbers between -2 and 2 that float16 and bfloat16 have, too.
  void fill(uint64_t seed) {
    constexpr uint16_t kHalves[] = {0x3c00, 0xbc00, 0x3800, 0x4000, 0, 0xb800, 0x3e00, 0xc000};
    constexpr float kFloats[] = {1, -1, 0.5, 2, 0, -0.5, 1.5, -2};
    for (int64_t i = 0; i < num_elements_; ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      const auto choice = seed >> 61;
      uint32_t bits = 0;
      std::memcpy(&bits, &kFloats[choice], sizeof(bits));
      switch (view_.dtype) {
        case DType::float32:
          as<uint32_t>()[i] = bits;
          break;
        case DType::bfloat16:
          as<uint16_t>()[i] = static_cast<uint16_t>(bits >> 16);
          break;
        case DType::float16:
          as<uint16_t>()[i] = kHalves[choice];
          break;
        default:
          if (element_size(view_.dtype) == 1) bytes_[i] = static_cast<char>(choice & 1);
      }
    }
  }

 private:
  TensorView view_;
  int64_t num_elements_ = 0;
  std::unique_ptr<char[]> bytes_;
};

/// The number in a tensor of floats.
inline double number_at(const TensorView& tensor, int64_t offset) {
  if (tensor.dtype == DType::float32) return tensor.as<float>()[offset];
  const uint32_t half = tensor.as<uint16_t>()[offset];
  if (tensor.dtype == DType::bfloat16) {
    const uint32_t bits = half << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  const int exponent = static_cast<int>(half >> 10 & 31);
  const double fraction = half & 1023;
  const double size = exponent == 0    ? std::ldexp(fraction, -24)
                      : exponent == 31 ? INFINITY
                                       : std::ldexp(1024 + fraction, exponent - 25);
  return half >> 15 ? -size : size;
}

/// A table of int32 or int64, likewise.
class Table {
 public:
  Table(Reader& in, int64_t rows, int64_t columns, auto next) {
    table_ = {
        .is_int64 = in.flag(),
        .rows = rows,
        .columns = columns,
        .row_stride = columns + (in.rarely(8) ? in.between(0, 3) : 0)
    };
    const int64_t size = rows * columns == 0 ? 0 : (rows - 1) * table_.row_stride + columns;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t value = next();
      long_.push_back(value);
      if (!table_.is_int64) int_.push_back(static_cast<int32_t>(value));
    }
    long_.shrink_to_fit();
    int_.shrink_to_fit();
  }
  /// Points into this object.
  IndexTable view() const {
    IndexTable table = table_;
    table.data = table.is_int64 ? static_cast<const void*>(long_.data()) : int_.data();
    return table;
  }

 private:
  IndexTable table_;
  std::vector<int64_t> long_;
  std::vector<int32_t> int_;
};

}  // namespace cpattn::fuzz
