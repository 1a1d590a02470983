// SPDX-License-Identifier: Apache-2.0
#include "cpattn/sparse/split_norm.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "ops/base/kernel_table.h"
#include "ops/base/rows.h"
#include "ops/base/tensor_checks.h"

namespace cpattn {
namespace {

/// A weight or bias as float32.
std::vector<float> parameter(
    const SplitNorm& arguments, const char* name, const TensorView& tensor, int64_t size
) {
  const char* function = arguments.function;
  check_tensor(function, name, tensor, 1);
  check(
      tensor.dim(0) == size, function, ": ", name, " must have ", size, " elements, got ",
      tensor.dim(0)
  );
  check(
      tensor.dtype == arguments.x.dtype || tensor.dtype == DType::float32, function, ": ", name,
      " must be float32 or of the dtype of x (", arguments.x.dtype, "), got ", tensor.dtype
  );
  std::vector<float> values(size);
  const auto type = element_type(function, name, tensor.dtype);
  active_sparse_kernels().rows.widen[type](tensor.data, size, values.data());
  return values;
}

/// One of the two norms.
class Norm {
 public:
  Norm(
      const SplitNorm& arguments,
      const char* weight_name,
      const TensorView& weight,
      const char* bias_name,
      const std::optional<TensorView>& bias,
      int64_t size,
      const char* eps_name,
      float eps
  )
      : run_(
            active_sparse_kernels()
                .rows.rms_norm[element_type(arguments.function, "x", arguments.x.dtype)]
        ),
        weight_(parameter(arguments, weight_name, weight, size)),
        eps_(eps) {
    if (bias) bias_ = parameter(arguments, bias_name, *bias, size);
    check(eps >= 0, arguments.function, ": ", eps_name, " must be >= 0, got ", eps);
  }
  void operator()(const char* x, char* out) const {
    run_(
        x, weight_.data(), bias_.empty() ? nullptr : bias_.data(),
        static_cast<int64_t>(weight_.size()), eps_, out
    );
  }

 private:
  void (*run_)(const void*, const float*, const float*, int64_t, float, void*);
  std::vector<float> weight_, bias_;
  float eps_;
};

/// That results have the dtype of x and lie apart from the arguments and from each other.
void check_results(const SplitNorm& arguments) {
  const char* function = arguments.function;
  std::vector<std::pair<const char*, const TensorView*>> results = {
      {"q", &arguments.q}, {"k_nope", &arguments.k_nope}, {"k_pe", &arguments.k_pe}
  };
  if (arguments.latent) results.emplace_back("latent_cache", &*arguments.latent);
  for (std::size_t i = 0; i < results.size(); ++i) {
    const auto& [name, result] = results[i];
    check_dtype(function, name, result->dtype, arguments.x.dtype);
    check_no_overlap(function, name, *result, "x", arguments.x);
    for (std::size_t j = 0; j < i; ++j) {
      check_no_overlap(function, name, *result, results[j].first, *results[j].second);
    }
  }
}

}  // namespace

void split_qk_norm(const SplitNorm& arguments) {
  const auto& [function, x, q_weight, kv_weight, q_bias, kv_bias, q_rank, kv_rank, rope_dim, q_eps, kv_eps, q, k_nope, k_pe, latent] =
      arguments;
  check_tensor(function, "x", x, 2);
  check(
      q_rank > 0 && kv_rank > 0 && rope_dim >= 0, function,
      ": q_lora_rank and kv_lora_rank must be positive and qk_rope_head_dim not negative, got ",
      q_rank, ", ", kv_rank, " and ", rope_dim
  );
  check(
      std::max({q_rank, kv_rank, rope_dim}) <= INT32_MAX, function,
      ": q_lora_rank, kv_lora_rank and qk_rope_head_dim must fit into int32, got ", q_rank, ", ",
      kv_rank, " and ", rope_dim
  );
  check(
      x.dim(1) == q_rank + kv_rank + rope_dim, function,
      ": x must have q_lora_rank + kv_lora_rank + qk_rope_head_dim = ", q_rank + kv_rank + rope_dim,
      " columns, got shape ", ShapeOf{x}
  );
  const Norm q_norm(arguments, "q_weight", q_weight, "q_bias", q_bias, q_rank, "q_eps", q_eps);
  const Norm kv_norm(
      arguments, "kv_weight", kv_weight, "kv_bias", kv_bias, kv_rank, "kv_eps", kv_eps
  );
  const int64_t rows = x.dim(0);
  check_rows(function, "q", q, {rows, q_rank});
  check_rows(function, "k_nope", k_nope, {rows, 1, kv_rank});
  check_rows(function, "k_pe", k_pe, {rows, 1, rope_dim});
  if (latent) check_rows(function, "latent", *latent, {rows, 1, kv_rank + rope_dim});
  check_results(arguments);
  const int64_t bytes = element_size(x.dtype);
  parallel_rows(rows, x.dim(1) * bytes, [&](int64_t row, int64_t end) {
    for (; row < end; ++row) {
      const char* from = row_data(x, row);
      const char* kv = from + q_rank * bytes;
      q_norm(from, row_data(q, row));
      kv_norm(kv, row_data(k_nope, row));
      if (rope_dim > 0) std::memcpy(row_data(k_pe, row), kv + kv_rank * bytes, rope_dim * bytes);
      if (latent) std::memcpy(row_data(*latent, row), kv, (kv_rank + rope_dim) * bytes);
    }
  });
}

}  // namespace cpattn
