// SPDX-License-Identifier: Apache-2.0
// Threads of the pool that spin before they sleep.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

using Clock = std::chrono::steady_clock;
using Microseconds = std::chrono::microseconds;

/// While alive, threads spin for so many microseconds.
class SpinScope {
 public:
  explicit SpinScope(int spin) : before_(spin_us()) { set_spin_us(spin); }
  ~SpinScope() { set_spin_us(before_); }
  SpinScope(const SpinScope&) = delete;
  SpinScope& operator=(const SpinScope&) = delete;

 private:
  int before_;
};

constexpr int kLong = 1000000;

void busy_for(Microseconds gap) {
  const auto end = Clock::now() + gap;
  while (Clock::now() < end) {
  }
}

/// A call whose items all wait until each of them has a thread: whether they met. If a worker
/// missed that there is a job, they do not.
bool threads_meet(int num_threads) {
  std::atomic<int> arrived{0};
  std::atomic<bool> met{true};
  const auto end = Clock::now() + std::chrono::seconds(20);
  parallel_for(num_threads, num_threads, [&](int64_t, StopToken&) {
    ++arrived;
    while (arrived < num_threads && met) {
      if (Clock::now() > end) met = false;
      sched_yield();
    }
  });
  return met;
}

/// How often threads of this process went to sleep so far.
int64_t num_sleeps() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_nvcsw;
}

int64_t sleeps_of_calls(int calls, Microseconds gap) {
  threads_meet(2);
  const int64_t before = num_sleeps();
  for (int i = 0; i < calls; ++i) {
    EXPECT_TRUE(threads_meet(2));
    busy_for(gap);
  }
  return num_sleeps() - before;
}

TEST(ThreadSpin, TinyCallsBackToBackFindTheirWorkers) {
  for (const int spin : {0, 1, 50}) {
    const SpinScope scope(spin);
    for (int i = 0; i < 3000; ++i) ASSERT_TRUE(threads_meet(2)) << spin << " " << i;
  }
}

TEST(ThreadSpin, NoJobIsMissedOnTheWayToSleep) {
  std::mt19937 random(7);  // NOLINT: the same gaps each time
  std::uniform_int_distribution<int> gap(0, 60);
  for (const int spin : {0, 5, 20}) {
    const SpinScope scope(spin);
    for (int i = 0; i < 2000; ++i) {
      ASSERT_TRUE(threads_meet(2)) << spin << " " << i;
      busy_for(Microseconds(gap(random)));
    }
  }
}

TEST(ThreadSpin, MoreThreadsThanCpusMeetToo) {
  const SpinScope scope(50);
  for (int i = 0; i < 100; ++i) {
    for (const int threads : {2, 7, 3}) ASSERT_TRUE(threads_meet(threads)) << i << " " << threads;
  }
}

TEST(ThreadSpin, WorkersThatSpinDoNotSleepBetweenCalls) {
  if (usable_cpus() < 2) GTEST_SKIP() << "one CPU: nobody spins";
  constexpr int kCalls = 400;
  constexpr Microseconds kGap(200);
  const SpinScope scope(kLong);
  EXPECT_LT(sleeps_of_calls(kCalls, kGap), kCalls / 4);
  set_spin_us(0);
  EXPECT_GT(sleeps_of_calls(kCalls, kGap), kCalls / 4);
}

TEST(ThreadSpin, NestedCallsAndSeveralCallersFindTheirWay) {
  const SpinScope scope(20);
  std::vector<std::thread> callers;
  callers.reserve(3);
  std::atomic<int64_t> sum{0};
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        parallel_for(4, 2, [&](int64_t, StopToken&) {
          parallel_for(5, 2, [&](int64_t item, StopToken&) { sum += item; });
        });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sum, 3 * 300 * 4 * 10);
}

#if !defined(__SANITIZE_THREAD__)
/// Whether `test` is true in a forked child, whose pool starts anew.
bool true_in_child(const std::function<bool()>& test) {
  const pid_t child = fork();
  if (child == 0) _exit(test() ? 0 : 1);
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

TEST(ThreadSpin, NobodySpinsInAForkedChildWithMoreThreadsThanCpus) {
  const SpinScope scope(kLong);
  EXPECT_TRUE(true_in_child([] {
    cpu_set_t cpus;
    sched_getaffinity(0, sizeof cpus, &cpus);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&cpus) > 1; ++cpu) {
      CPU_CLR(cpu, &cpus);
    }
    sched_setaffinity(0, sizeof cpus, &cpus);
    return sleeps_of_calls(200, Microseconds(200)) > 50;
  }));
}

TEST(ThreadSpin, AWorkerThatSpinsIsNoneOfAForkedChild) {
  const SpinScope scope(kLong);
  ASSERT_TRUE(threads_meet(2));  // the worker of the parent spins now
  EXPECT_TRUE(true_in_child([] { return threads_meet(2); }));
  EXPECT_TRUE(threads_meet(2));
}
#endif

TEST(ThreadSpin, RefusesNonsense) {
  const int before = spin_us();
  EXPECT_GE(before, 0);
  EXPECT_THROW(set_spin_us(-1), std::invalid_argument);
  EXPECT_THROW(set_spin_us(1000001), std::invalid_argument);
  EXPECT_EQ(spin_us(), before);
}

}  // namespace
}  // namespace cpattn
