// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/parallel.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <mutex>
#include <new>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpattn/base/thread_stack.h"

namespace cpattn {
namespace {

int64_t sum_of_items(int64_t num_items, int num_threads) {
  std::atomic<int64_t> sum{0};
  parallel_for(num_items, num_threads, [&](int64_t item, StopToken&) { sum += item; });
  return sum;
}

/// A team of `kTeam` threads, as an OpenMP runtime has one.
constexpr int kTeam = 3;
std::atomic<int> teams_started{0};
void start_team(void (*work)(void*), void* data, unsigned num_threads, unsigned flags) {
  EXPECT_EQ(num_threads, 0U);
  EXPECT_EQ(flags, 0U);
  ++teams_started;
  std::vector<std::thread> others;
  others.reserve(kTeam - 1);
  for (int i = 1; i < kTeam; ++i) others.emplace_back(work, data);
  work(data);
  for (auto& other : others) other.join();
}

/// One that runs other work already: the caller alone.
void start_nobody(void (*work)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  work(data);
}

class OpenMpScope {
 public:
  explicit OpenMpScope(GompParallel start) { set_openmp(start); }
  ~OpenMpScope() { set_openmp(nullptr); }
  OpenMpScope(const OpenMpScope&) = delete;
  OpenMpScope& operator=(const OpenMpScope&) = delete;
};

TEST(ParallelFor, RunsEveryItemOnce) {
  for (int threads : {1, 2, 3, 8}) {
    for (int64_t items : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(items);
      parallel_for(items, threads, [&](int64_t item, StopToken&) { ++seen[item]; });
      for (const auto& count : seen) EXPECT_EQ(count, 1);
    }
  }
}

TEST(ParallelFor, OneThreadMeansTheCallers) {
  const auto self = std::this_thread::get_id();
  parallel_for(10, 1, [&](int64_t, StopToken&) { EXPECT_EQ(std::this_thread::get_id(), self); });
}

TEST(ParallelFor, RethrowsTheFirstError) {
  for (int threads : {1, 4}) {
    EXPECT_THROW(
        parallel_for(
            100, threads,
            [](int64_t item, StopToken&) {
              if (item == 13) throw std::runtime_error("13");
            }
        ),
        std::runtime_error
    );
    EXPECT_EQ(sum_of_items(100, threads), 4950);  // the pool survives
  }
}

TEST(ParallelFor, CallsNestedInAPollHaveScratchOfTheirOwn) {
  static int polls = 0;
  constexpr std::size_t kBytes = 4096;
  const auto fill_scratch = [](std::size_t bytes, char value) {
    auto* scratch = static_cast<char*>(thread_scratch("call", bytes));
    std::fill_n(scratch, bytes, value);
    return scratch;
  };
  // Larger than the outer one, which would move if it were the same.
  const InterruptScope interrupts([] {
    ++polls;
    parallel_for(1, 1, [](int64_t, StopToken&) {
      std::fill_n(static_cast<char*>(thread_scratch("call", 64 * kBytes)), 64 * kBytes, 'n');
    });
    return false;
  });
  parallel_for(1, 1, [&](int64_t, StopToken& stop) {
    const char* scratch = fill_scratch(kBytes, 'o');
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    while (std::chrono::steady_clock::now() < end) ASSERT_FALSE(stop.should_stop());
    EXPECT_EQ(thread_scratch("call", kBytes), scratch);
    for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(scratch[i], 'o') << i;
  });
  EXPECT_GT(polls, 0);
}

TEST(ParallelFor, SeveralCallersShareTheWorkers) {
  std::vector<std::thread> callers;
  callers.reserve(6);
  std::atomic<int> right{0};
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) right += sum_of_items(200, 4) == 19900;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(right, 300);
}

TEST(ParallelFor, AnItemMayCallParallelFor) {
  std::atomic<int64_t> sum{0};
  parallel_for(8, 4, [&](int64_t, StopToken&) { sum += sum_of_items(10, 4); });
  EXPECT_EQ(sum, 8 * 45);
}

TEST(ParallelFor, TheHookInterruptsLongWork) {
  const InterruptScope scope([] { return true; });
  EXPECT_THROW(
      parallel_for(
          1000000, 2,
          [](int64_t, StopToken& stop) {
            for (int i = 0; i < 100 && !stop.should_stop(); ++i) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
          }
      ),
      Interrupted
  );
}

#if defined(__x86_64__)
TEST(ParallelFor, ThreadsTakeSubnormalNumbersAsTheCallerDoes) {
  constexpr unsigned kFlushToZero = 0x8000, kFlags = 0x3f;
  constexpr int kThreads = 3;
  for (GompParallel start : {GompParallel{nullptr}, GompParallel{start_team}}) {
    const OpenMpScope scope(start);
    for (unsigned chosen : {kFlushToZero, 0U}) {
      const unsigned before = _mm_getcsr();
      _mm_setcsr((before & ~kFlushToZero) | chosen);
      std::atomic<int> inside{0}, same{0};
      parallel_for(kThreads, kThreads, [&](int64_t, StopToken&) {
        same += (_mm_getcsr() & ~kFlags & kFlushToZero) == chosen;
        for (++inside; inside < kThreads;) std::this_thread::yield();
      });
      EXPECT_EQ(_mm_getcsr() & kFlushToZero, chosen);
      _mm_setcsr(before);
      EXPECT_EQ(same, kThreads);
    }
  }
}
#endif

#if !defined(__SANITIZE_THREAD__)  // which forks badly, and keeps much of its own on stacks
TEST(ThreadStack, AStackWithoutRoomIsRefusedByName) {
  std::string refused;
  // On a thread whose stack may be larger than what it was asked for: one that another one had.
  const auto look = [&](std::size_t left) {
    pthread_attr_t own;
    void* begin = nullptr;
    std::size_t size = 0;
    ASSERT_EQ(pthread_getattr_np(pthread_self(), &own), 0);
    ASSERT_EQ(pthread_attr_getstack(&own, &begin, &size), 0);
    pthread_attr_destroy(&own);
    const auto free = static_cast<char*>(__builtin_frame_address(0)) - static_cast<char*>(begin);
    *static_cast<volatile char*>(__builtin_alloca(free - left)) = 0;
    try {
      check_stack("some_function");
    } catch (const std::runtime_error& error) {
      refused = error.what();
    }
  };
  std::thread(look, 4 * kLeastStack).join();
  EXPECT_EQ(refused, "");
  std::thread(look, kLeastStack / 2).join();
  EXPECT_TRUE(refused.starts_with("some_function: needs 112 KiB of stack")) << refused;
}

/// Forks once in the middle of a call, as a signal handler may.
pid_t forked_in_hook = -1;
bool fork_once() {
  if (forked_in_hook < 0) forked_in_hook = fork();
  return false;
}

TEST(ParallelFor, ForkedInTheMiddleOfACallTheChildIsToldAndTheParentGoesOn) {
  const pid_t parent = getpid();
  std::atomic<int64_t> sum{0};
  std::atomic<int> inside{0};
  const auto item = [&](int64_t number, StopToken& stop) {
    ++inside;
    while (inside < 3) std::this_thread::yield();  // helpers have begun items
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    while (std::chrono::steady_clock::now() < end) {
      if (stop.should_stop()) return;
    }
    sum += number;
  };
  bool told = false;
  {
    const InterruptScope interrupts(&fork_once);
    try {
      parallel_for(3, 3, item);
    } catch (const std::runtime_error&) {
      told = true;
    }
  }
  // The pool of the child serves other calls.
  if (getpid() != parent) _exit(told && sum_of_items(100, 4) == 4950 ? 0 : 1);
  EXPECT_FALSE(told);
  EXPECT_EQ(sum, 3);
  int status = 0;
  ASSERT_EQ(waitpid(forked_in_hook, &status, 0), forked_in_hook);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(ParallelFor, WorksInAForkedChildAndInItsParent) {
  ASSERT_EQ(sum_of_items(100, 4), 4950);  // the parent's workers exist
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(sum_of_items(100, 4) == 4950 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(sum_of_items(100, 4), 4950);
}
#endif

TEST(OpenMp, RunsEveryItemOnceOnItsTeam) {
  for (GompParallel start : {start_team, start_nobody}) {
    const OpenMpScope scope(start);
    EXPECT_EQ(openmp(), start);
    for (int threads : {1, 2, 3, 8}) {
      for (int64_t items : {0, 1, 2, 7, 1000}) {
        std::vector<std::atomic<int>> seen(items);
        parallel_for(items, threads, [&](int64_t item, StopToken&) { ++seen[item]; });
        for (const auto& count : seen) EXPECT_EQ(count, 1);
      }
    }
  }
  EXPECT_EQ(openmp(), nullptr);
}

TEST(OpenMp, HasNoMoreThreadsThanTheCallMayHave) {
  const OpenMpScope scope(start_team);
  for (int threads : {1, 2, 3, 8}) {
    const int before = teams_started;
    std::mutex mutex;
    std::set<std::thread::id> seen;
    std::atomic<int> inside{0};
    const int wanted = std::min(threads, kTeam);
    parallel_for(wanted, threads, [&](int64_t, StopToken&) {
      {
        const std::scoped_lock lock(mutex);
        seen.insert(std::this_thread::get_id());
      }
      // Until as many are here: no thread takes two items.
      for (++inside; inside < wanted;) std::this_thread::yield();
    });
    EXPECT_EQ(seen.size(), static_cast<std::size_t>(wanted));
    EXPECT_EQ(teams_started - before, threads == 1 ? 0 : 1);
  }
  // Beyond the seats of a call nobody works, however many items there are.
  std::mutex mutex;
  std::set<std::thread::id> seen;
  parallel_for(1000, 2, [&](int64_t, StopToken&) {
    const std::scoped_lock lock(mutex);
    seen.insert(std::this_thread::get_id());
  });
  EXPECT_LE(seen.size(), 2U);
}

TEST(OpenMp, RethrowsTheFirstErrorAndIsInterrupted) {
  const OpenMpScope scope(start_team);
  const auto fail = [](int64_t item, StopToken&) {
    if (item == 13) throw std::runtime_error("13");
  };
  EXPECT_THROW(parallel_for(100, 4, fail), std::runtime_error);
  EXPECT_EQ(sum_of_items(100, 4), 4950);
  const InterruptScope interrupts([] { return true; });
  const auto sleep = [](int64_t, StopToken& stop) {
    for (int i = 0; i < 100 && !stop.should_stop(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  EXPECT_THROW(parallel_for(1000000, 3, sleep), Interrupted);
}

#if !defined(__SANITIZE_THREAD__)
TEST(OpenMp, IsNotThatOfAForkedChild) {
  const OpenMpScope scope(start_team);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(openmp() == nullptr && sum_of_items(100, 4) == 4950 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(openmp(), start_team);
}
#endif

TEST(NumThreads, CanBeSetAndRefusesNonsense) {
  const int before = default_num_threads();
  EXPECT_GE(before, 1);
  set_num_threads(3);
  EXPECT_EQ(default_num_threads(), 3);
  EXPECT_THROW(set_num_threads(0), std::invalid_argument);
  EXPECT_EQ(default_num_threads(), 3);
  set_num_threads(before);
}

TEST(NumThreads, OfAThreadComeBeforeThoseOfTheProcess) {
  const int process = default_num_threads();
  EXPECT_EQ(exchange_thread_default(process + 5), 0);
  EXPECT_EQ(default_num_threads(), process + 5);
  int elsewhere = 0;
  std::thread([&] { elsewhere = default_num_threads(); }).join();
  EXPECT_EQ(elsewhere, process);
  EXPECT_THROW(exchange_thread_default(-1), std::invalid_argument);
  EXPECT_EQ(exchange_thread_default(0), process + 5);
  EXPECT_EQ(default_num_threads(), process);
}

// Sanitizers have a heap of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(ThreadScratch, IsFreedBehindACallWhereItIsFarAboveTheUsual) {
  const auto usual = [] { return thread_scratch("call", std::size_t{1} << 20); };
  const auto resident = [] {
    int64_t pages = 0, of_those = 0;
    std::ifstream("/proc/self/statm") >> pages >> of_those;
    return of_those * sysconf(_SC_PAGESIZE);
  };
  usual();
  const int64_t before = resident();
  constexpr std::size_t kHuge = std::size_t{256} << 20;
  parallel_for(1, 1, [&](int64_t, StopToken&) {
    std::fill_n(static_cast<char*>(thread_scratch("call", kHuge)), kHuge, 'h');
    // The end of an inner call frees nothing that an outer item holds.
    parallel_for(1, 1, [](int64_t, StopToken&) {});
    EXPECT_EQ(*static_cast<char*>(thread_scratch("call", 1)), 'h');
  });
  EXPECT_LT(resident() - before, int64_t{64} << 20);
  const void* kept = usual();
  parallel_for(1, 1, [&](int64_t, StopToken&) { EXPECT_EQ(usual(), kept); });
  EXPECT_EQ(usual(), kept);
  try {
    thread_scratch("call", std::size_t{1} << 60);
    FAIL();
  } catch (const std::bad_alloc& error) {
    EXPECT_STREQ(
        error.what(), "call: no memory for 1152921504606846976 bytes of a thread's scratch"
    );
  }
}
#endif

TEST(ThreadScratch, IsAlignedAndGrows) {
  auto* small = static_cast<char*>(thread_scratch("call", 100));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % 64, 0U);
  auto* large = static_cast<char*>(thread_scratch("call", 1 << 20));
  large[(1 << 20) - 1] = 1;
  EXPECT_EQ(thread_scratch("call", 100), large);
}

}  // namespace
}  // namespace cpattn
