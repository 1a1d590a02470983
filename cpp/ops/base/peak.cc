// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "ops/base/kernel_table.h"

namespace cpattn {
namespace {

constexpr int kSamples = 6;
constexpr double kSampleSeconds = 0.015;
/// More items than threads, so that a worker that wakes late costs little.
constexpr int64_t kItemsPerThread = 16;

DType parse_dtype(std::string_view name) {
  for (DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    if (name == dtype_name(dtype)) return dtype;
  }
  check(false, "measure_peak: dtype must be float32, float16 or bfloat16, got '", name, "'");
  __builtin_unreachable();
}

double flops_per_second(const kernels::AttentionKernel& kernel, int num_threads, int64_t rounds) {
  std::atomic<int64_t> flops{0};
  const auto start = std::chrono::steady_clock::now();
  parallel_for(num_threads * kItemsPerThread, num_threads, [&](int64_t, StopToken&) {
    flops += kernel.peak_flops(rounds);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return static_cast<double>(flops) / seconds.count();
}

}  // namespace

double measure_peak(std::string_view dtype, int num_threads) {
  check(num_threads >= 1, "measure_peak: num_threads must be >= 1, got ", num_threads);
  const auto& kernel =
      active_kernels().attention[element_type("measure_peak", "dtype", parse_dtype(dtype))];
  const int64_t trial = 20000;
  const auto flops_per_round = static_cast<double>(kernel.peak_flops(1));
  const double rate = flops_per_second(kernel, 1, trial);
  const auto rounds =
      static_cast<int64_t>(rate * kSampleSeconds / kItemsPerThread / flops_per_round);
  double best = 0;
  for (int i = 0; i < kSamples; ++i) {
    best = std::max(best, flops_per_second(kernel, num_threads, std::max<int64_t>(1, rounds)));
  }
  return best;
}

}  // namespace cpattn
