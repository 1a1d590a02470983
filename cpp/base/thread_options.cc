// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/printable.h"
#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/system.h"

namespace cpattn {
namespace {

constexpr int kMostThreads = 65536;
constexpr int kUsualSpin = 50;
constexpr int kLongestSpin = 1000000;  // the longest spin of a worker after its last job

/// The number in an environment variable's text; -1 if it is not set.
int number_of(const char* variable, const char* text, long least, long most) {
  if (text == nullptr || *text == '\0') return -1;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  check(
      *end == '\0' && value >= least && value <= most, variable, " must be a number from ", least,
      " to ", most, ", got '", printable(text), "'"
  );
  return static_cast<int>(value);
}

std::atomic<int>& configured_num_threads() {
  static std::atomic<int> num_threads{[] {
    const int chosen =
        number_of("CPATTN_NUM_THREADS", std::getenv("CPATTN_NUM_THREADS"), 1, kMostThreads);
    return chosen < 0 ? usable_cpus() : chosen;
  }()};
  return num_threads;
}

std::atomic<int>& configured_spin_us() {
  static std::atomic<int> microseconds{[] {
    const int chosen = number_of("CPATTN_SPIN_US", std::getenv("CPATTN_SPIN_US"), 0, kLongestSpin);
    return chosen < 0 ? kUsualSpin : chosen;
  }()};
  return microseconds;
}

std::atomic<GompParallel> chosen_openmp{nullptr};

/// The number of threads for calls of this thread; 0 for the number of the process.
thread_local int thread_default = 0;

}  // namespace

int usable_cpus() {
  const int told = system::usable_cpus();
  return told > 0 ? told : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int default_num_threads() {
  if (thread_default > 0) return thread_default;
  return configured_num_threads().load(std::memory_order_relaxed);
}

int exchange_thread_default(int num_threads) {
  check(num_threads >= 0, "exchange_thread_default: num_threads must be >= 0, got ", num_threads);
  return std::exchange(thread_default, num_threads);
}

int check_num_threads(const char* function, int num_threads) {
  check(num_threads >= 1, function, ": num_threads must be >= 1, got ", num_threads);
  check(
      num_threads <= kMostThreads, function, ": num_threads must be at most ", kMostThreads,
      ", got ", num_threads
  );
  return num_threads;
}

void set_num_threads(int num_threads) {
  check_num_threads("set_num_threads", num_threads);
  configured_num_threads().store(num_threads, std::memory_order_relaxed);
}

int spin_us() { return configured_spin_us().load(std::memory_order_relaxed); }

void set_spin_us(int microseconds) {
  check(
      microseconds >= 0 && microseconds <= kLongestSpin,
      "set_spin_us: microseconds must be from 0 to ", kLongestSpin, ", got ", microseconds
  );
  configured_spin_us().store(microseconds, std::memory_order_relaxed);
}

void set_openmp(GompParallel start) {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { chosen_openmp.store(nullptr); });
  static_cast<void>(registered);
  chosen_openmp.store(start, std::memory_order_relaxed);
}

GompParallel openmp() { return chosen_openmp.load(std::memory_order_relaxed); }

}  // namespace cpattn
