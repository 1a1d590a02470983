// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/peak.h"

namespace cpattn {
namespace {

/// Far beyond any last-level cache a process gets to itself.
constexpr int64_t kBufferBytes = int64_t{512} << 20;
constexpr int64_t kItemBytes = int64_t{1} << 20;
constexpr int kSamples = 6;

/// Eight independent sums keep enough loads in flight on any vector width.
uint64_t sum_of(const uint64_t* words, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i < count; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

double measure_read_bandwidth(int num_threads) {
  check(num_threads >= 1, "measure_read_bandwidth: num_threads must be >= 1, got ", num_threads);
  constexpr int64_t kItems = kBufferBytes / kItemBytes;
  constexpr int64_t kItemWords = kItemBytes / int64_t{sizeof(uint64_t)};
  const std::unique_ptr<uint64_t[]> buffer(new uint64_t[kItems * kItemWords]);
  std::memset(buffer.get(), 1, kBufferBytes);  // untouched memory is one page of zeros
  double best = 0;
  for (int i = 0; i < kSamples; ++i) {
    std::atomic<uint64_t> total{0};
    const auto start = std::chrono::steady_clock::now();
    parallel_for(kItems, num_threads, [&](int64_t item, StopToken&) {
      total += sum_of(buffer.get() + item * kItemWords, kItemWords);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kBufferBytes) / seconds.count());
  }
  return best;
}

}  // namespace cpattn
