// SPDX-License-Identifier: Apache-2.0
#include "cpattn/attention/merge_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/trace.h"
#include "ops/base/kernel_table.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

constexpr char kFunction[] = "merge_state";
constexpr int64_t kItemBytes = 1 << 18;  // of out_a that a thread takes at once

/// e^x, and 0 below 2^-100: products with smaller weights could be subnormal, which are slow.
float weight_of(float x) {
  constexpr float kLeast = -69.3147F;
  return x < kLeast ? 0.0F : std::exp(x);
}

void check_same_shape(const char* name, const TensorView& tensor, const TensorView& like) {
  bool same = tensor.rank == like.rank;
  for (int axis = 0; same && axis < like.rank; ++axis)
    same = tensor.shape[axis] == like.shape[axis];
  check(same, kFunction, ": ", name, " must have shape ", ShapeOf{like}, ", got ", ShapeOf{tensor});
}

void check_lse(const char* name, const TensorView& lse, const TensorView& out) {
  check(lse.dtype == DType::float32, kFunction, ": ", name, " must be float32, got ", lse.dtype);
  TensorView expected = out;
  expected.rank = 2;
  check_same_shape(name, lse, expected);
  for (int64_t t = 0; t < lse.shape[0]; ++t) {
    for (int64_t h = 0; h < lse.shape[1]; ++h) {
      const float value = lse.as<float>()[t * lse.strides[0] + h * lse.strides[1]];
      check(
          value != std::numeric_limits<float>::infinity(), kFunction, ": ", name,
          " must not be +inf (a row without keys has -inf), got +inf at [", t, ", ", h, "]"
      );
    }
  }
}

/// The state that threads share; each row is merged by one of them.
struct Merge {
  const TensorView &out_a, &lse_a, &out_b, &lse_b;
  void (*weighted_sum)(float, void*, float, const void*, int64_t);

  void row(int64_t t, int64_t h) const {
    const int64_t bytes = element_size(out_a.dtype);
    float& a = lse_a.as<float>()[t * lse_a.strides[0] + h * lse_a.strides[1]];
    const float b = lse_b.as<float>()[t * lse_b.strides[0] + h * lse_b.strides[1]];
    char* row_a = out_a.as<char>() + (t * out_a.strides[0] + h * out_a.strides[1]) * bytes;
    const char* row_b = out_b.as<char>() + (t * out_b.strides[0] + h * out_b.strides[1]) * bytes;
    const float maximum = std::fmax(a, b);
    if (maximum == -std::numeric_limits<float>::infinity()) {
      std::memset(row_a, 0, out_a.shape[2] * bytes);
      return;
    }
    const float weight_a = weight_of(a - maximum);
    const float weight_b = weight_of(b - maximum);
    const float total = weight_a + weight_b;
    weighted_sum(weight_a / total, row_a, weight_b / total, row_b, out_a.shape[2]);
    a = maximum + std::log(total);
  }
};

}  // namespace

void merge_state(
    const TensorView& out_a,
    const TensorView& lse_a,
    const TensorView& out_b,
    const TensorView& lse_b
) {
  const auto type = element_type(kFunction, "out_a", out_a.dtype);
  check_tensor(kFunction, "out_a", out_a, 3);
  check_tensor(kFunction, "out_b", out_b, 3);
  check(
      out_b.dtype == out_a.dtype, kFunction, ": out_b must be ", out_a.dtype, ", got ", out_b.dtype
  );
  check_same_shape("out_b", out_b, out_a);
  check_lse("lse_a", lse_a, out_a);
  check_lse("lse_b", lse_b, out_a);
  const auto check_apart = [](const char* target, const TensorView& written, const char* source,
                              const TensorView& read) {
    check_no_overlap(kFunction, target, written, source, read);
  };
  check_apart("out_a", out_a, "out_b", out_b);
  check_apart("out_a", out_a, "lse_a", lse_a);
  check_apart("out_a", out_a, "lse_b", lse_b);
  check_apart("lse_a", lse_a, "out_b", out_b);
  check_apart("lse_a", lse_a, "lse_b", lse_b);

  const int64_t tokens = out_a.shape[0], heads = out_a.shape[1];
  const int64_t token_bytes = heads * out_a.shape[2] * element_size(out_a.dtype);
  const int64_t tokens_at_once =
      std::max<int64_t>(kItemBytes / std::max<int64_t>(token_bytes, 1), 1);
  const Merge merge{out_a, lse_a, out_b, lse_b, active_kernels().weighted_sum[type]};
  parallel_for(
      (tokens + tokens_at_once - 1) / tokens_at_once, default_num_threads(),
      [&](int64_t item, StopToken&) {
        const TraceSpan span(TraceScope::merge);
        const int64_t end = std::min((item + 1) * tokens_at_once, tokens);
        for (int64_t t = item * tokens_at_once; t < end; ++t) {
          for (int64_t h = 0; h < heads; ++h) merge.row(t, h);
        }
      }
  );
}

}  // namespace cpattn
