// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpattn/base/tensor_view.h"
#include "cpattn/kv/kv_scatter.h"

namespace cpattn {

/// Casts n numbers, divided by `scale`; null where rows are copied.
using RowCast = void (*)(const void* x, int64_t n, float scale, void* out);

/// The cast of rows, the argument `name`, to the dtype of `to_name`. Throws std::invalid_argument
/// for dtypes that have none.
RowCast row_cast(const char* function, const char* name, DType from, const char* to_name, DType to);

/// A tensor as runs of bytes without gaps, in row-major order.
class Runs {
 public:
  explicit Runs(const TensorView& tensor);

  int64_t run_bytes() const { return run_bytes_; }

  /// The address of the byte `offset` of the elements in row-major order.
  const char* at(int64_t offset) const;

 private:
  const char* data_;
  int64_t run_bytes_;
  int rank_ = 0;  // of dimensions outside a run, innermost first
  std::array<int64_t, TensorView::kMaxRank> sizes_{}, strides_{};
};

/// One part of write_kv_rows(), checked: rows in pieces that have no gaps and lie in one head.
class RowWriter {
 public:
  /// Throws like write_kv_rows() for faults of this part alone.
  RowWriter(const char* function, int64_t layer, int64_t num_rows, const KVRows& part);

  /// Bytes written for a row, and bytes read.
  int64_t written() const { return row_elements_ * to_bytes_; }
  int64_t traffic() const { return row_elements_ * (from_bytes_ + to_bytes_); }

  /// Whether pieces may bypass the CPU caches.
  bool can_stream() const;

  /// Writes a row to a slot; kStream bypasses the CPU caches.
  template <bool kStream>
  void write(int64_t row, int64_t slot) const;

 private:
  /// The scales of each token and head that are written.
  struct Scales {
    char* layer;
    int64_t num_heads, bytes;      // of one
    std::optional<Runs> given;     // else they are computed:
    float code_limit, type_limit;  // the largest number of a code, and of a scale
    RowCast narrow, widen;
    float (*largest)(const void* x, int64_t n);
  };

  void check_scales(const char* function, int64_t num_rows, const KVRows& part);
  void set_scales(const char* function, int64_t layer, const KVRows& part);
  void write_scales(int64_t row, int64_t slot, float* scales) const;
  float largest_of(int64_t first) const;
  template <bool kStream>
  void write_piece(const char* from, float scale, char* to) const;

  const char* function_;
  RowCast cast_;
  void (*stream_)(const void* from, int64_t bytes, void* to);
  Runs runs_;
  char* layer_;
  int64_t row_elements_, head_elements_, from_bytes_, to_bytes_;
  int64_t piece_elements_;
  int nan_code_;                    // with a scale that is NaN
  std::vector<float> head_scales_;  // one for all heads, or one for each
  std::optional<Scales> computed_;
};

}  // namespace cpattn
