// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/host_barrier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

/// The pages of a group whose ranks are this process and its children.
class Pages {
 public:
  explicit Pages(int size, int64_t num_bytes = HostBarrier::kPageBytes) {
    for (int rank = 0; rank < size; ++rank) {
      fds.push_back(static_cast<int>(syscall(SYS_memfd_create, "page", 1U)));  // MFD_CLOEXEC
      EXPECT_EQ(ftruncate(fds.back(), num_bytes), 0);
      pids.push_back(getpid());
    }
  }
  ~Pages() {
    for (int fd : fds) close(fd);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  std::unique_ptr<HostBarrier> barrier(int rank) const {
    return std::make_unique<HostBarrier>(rank, fds, pids);
  }

  std::vector<int> fds, pids;
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

double seconds_of(const std::function<void()>& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

TEST(HostBarrier, RanksSeeTheTermsOfAll) {
  constexpr int kSize = 4, kMeetings = 500;
  const Pages pages(kSize);
  std::vector<std::thread> ranks;
  std::atomic<int> wrong = 0;
  ranks.reserve(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto barrier = pages.barrier(rank);
      for (int64_t i = 0; i < kMeetings; ++i) {
        if (i % 50 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::vector<int64_t> terms = {10 * i + rank, -rank};
        const auto all = barrier->meet("test", std::span(terms).first(i % 3), 60);
        for (int64_t r = 0; r < kSize; ++r) {
          if (i % 3 > 0 && all[(i % 3) * r] != 10 * i + r) ++wrong;
          if (i % 3 > 1 && all[2 * r + 1] != -r) ++wrong;
        }
        if (std::ssize(all) != kSize * (i % 3)) ++wrong;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(wrong, 0);
}

TEST(HostBarrier, OneRankMeetsItself) {
  const Pages pages(1);
  const std::vector<int64_t> terms = {7};
  EXPECT_EQ(pages.barrier(0)->meet("test", terms, 0), terms);
}

TEST(HostBarrier, NobodyGoesOnBeforeAllHaveCome) {
  constexpr int kSize = 3, kMeetings = 200;
  const Pages pages(kSize);
  std::atomic<int> counts[kMeetings] = {};
  std::atomic<int> early = 0;
  std::vector<std::thread> ranks;
  ranks.reserve(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto barrier = pages.barrier(rank);
      for (auto& count : counts) {
        ++count;
        barrier->meet("test", {}, 60);
        if (count != kSize) ++early;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(early, 0);
}

TEST(HostBarrier, NamesThoseThatAreLate) {
  const Pages pages(3);
  const auto barrier = pages.barrier(1);
  std::string error;
  const double seconds =
      seconds_of([&] { error = error_of([&] { barrier->meet("test", {}, 0.1); }); });
  EXPECT_EQ(error, "test: rank 0, 2 of 3 did not answer: timed out after 0.1 s");
  EXPECT_GE(seconds, 0.1);
  EXPECT_EQ(
      error_of([&] { barrier->meet("again", {}, 0.1); }),
      "again: the group cannot be used any more, rank 1 has left it by an error"
  );
}

TEST(HostBarrier, NamesThoseThatHaveLeft) {
  const Pages pages(2);
  const auto barrier = pages.barrier(0);
  pages.barrier(1)->leave();
  const std::string process = std::to_string(getpid());
  EXPECT_EQ(
      error_of([&] { barrier->meet("test", {}, 60); }),
      "test: rank 1 of 2 did not answer: process " + process + " has left by an error"
  );
}

TEST(HostBarrier, NamesWhomThoseThatHaveLeftMissed) {
  const Pages pages(4);
  const auto barrier = pages.barrier(0), blamed = pages.barrier(3);
  const auto first = pages.barrier(1), second = pages.barrier(2);
  first->leave(3);
  second->leave(3);
  const std::string process = concat("process ", getpid());
  EXPECT_EQ(
      error_of([&] { barrier->meet("test", {}, 60); }),
      concat(
          "test: rank 3 of 4 did not answer: ", process, " has left because of it, ", process,
          " has left because of it"
      )
  );
  // That rank comes late, and learns who did not wait for it.
  EXPECT_EQ(
      error_of([&] { blamed->meet("test", {}, 60); }),
      concat(
          "test: rank 1, 2 of 4 did not answer: ", process, " has left by an error, ", process,
          " has left by an error"
      )
  );
}

TEST(HostBarrier, RanksAreNamedByTheirNumbersInTheGroup) {
  const Pages pages(3);
  const std::vector<int> names = {1, 4, 6};
  const auto member = [&](int rank) {
    return std::make_unique<HostBarrier>(rank, pages.fds, pages.pids, names, 8);
  };
  const auto barrier = member(0), second = member(1), third = member(2);
  EXPECT_TRUE(barrier->loss().ranks.empty());
  EXPECT_EQ(
      error_of([&] { barrier->meet("test", {}, 0.1); }),
      "test: rank 4, 6 of 8 did not answer: timed out after 0.1 s"
  );
  EXPECT_EQ(barrier->loss().ranks, (std::vector<int>{4, 6}));
  EXPECT_EQ(barrier->loss().reason, "timed out after 0.1 s");
  EXPECT_TRUE(barrier->loss().timed_out);
  EXPECT_EQ(
      error_of([&] { barrier->meet("again", {}, 0.1); }),
      "again: the group cannot be used any more, rank 1 has left it by an error"
  );
  second->leave(7);  // which is on another host
  EXPECT_EQ(
      error_of([&] { third->meet("test", {}, 60); }),
      concat("test: rank 7 of 8 did not answer: process ", getpid(), " has left because of it")
  );
  EXPECT_EQ(third->loss().ranks, std::vector<int>{7});
  EXPECT_FALSE(third->loss().timed_out);
}

TEST(HostBarrier, ARankThatIsBlamedNamesWhoLeftBecauseOfIt) {
  const Pages pages(2);
  const std::vector<int> names = {2, 3};
  HostBarrier(1, pages.fds, pages.pids, names, 4).leave(2);
  HostBarrier barrier(0, pages.fds, pages.pids, names, 4);
  EXPECT_EQ(
      error_of([&] { barrier.meet("test", {}, 60); }),
      concat("test: rank 3 of 4 did not answer: process ", getpid(), " has left by an error")
  );
}

TEST(HostBarrier, WhoeverIsAwaitedMayBeGivenUp) {
  const Pages pages(3);
  const auto barrier = pages.barrier(1);
  int asked = 0;
  const double seconds = seconds_of([&] {
    EXPECT_EQ(
        error_of([&] { barrier->meet("test", {}, 60, [&] { return ++asked == 3; }); }),
        "test: rank 0, 2 of 3 did not answer: "
    );
  });
  EXPECT_EQ(asked, 3);
  EXPECT_LT(seconds, 30);
  EXPECT_EQ(barrier->loss().ranks, (std::vector<int>{0, 2}));
  EXPECT_EQ(barrier->loss().reason, "");
}

TEST(HostBarrier, WhoIsMissingIsNamedAndNotWhoGaveUpForIt) {
  const Pages pages(3);
  const auto hasty = pages.barrier(0), patient = pages.barrier(1);
  std::string first, second;
  std::thread waiting([&] { second = error_of([&] { patient->meet("test", {}, 0.5); }); });
  first = error_of([&] { hasty->meet("test", {}, 0.1); });
  waiting.join();
  EXPECT_EQ(first.substr(0, 13), "test: rank 2 ") << first;
  EXPECT_EQ(second, "test: rank 2 of 3 did not answer: timed out after 0.5 s");
}

TEST(HostBarrier, WhatARankBroughtBeforeItLeftCounts) {
  const Pages pages(2);
  std::thread leaving([&] { pages.barrier(1)->meet("test", {}, 60); });  // then it is destroyed
  const auto barrier = pages.barrier(0);
  barrier->meet("test", {}, 60);
  leaving.join();
  EXPECT_THROW(barrier->meet("test", {}, 60), std::runtime_error);
}

TEST(HostBarrier, TheHookInterruptsAWait) {
  const Pages pages(2);
  const auto barrier = pages.barrier(0);
  const InterruptScope scope([] { return true; });
  EXPECT_THROW(barrier->meet("test", {}, 60), Interrupted);
  const std::string process = std::to_string(getpid());
  EXPECT_EQ(
      error_of([&] { pages.barrier(1)->meet("late", {}, 60); }),
      "late: rank 0 of 2 did not answer: process " + process + " has left by an error"
  );
}

TEST(HostBarrier, RefusesWhatIsNoGroup) {
  const Pages pages(2);
  const std::vector<int> nobody = {getpid()};
  EXPECT_THROW(HostBarrier(2, pages.fds, pages.pids), std::invalid_argument);
  EXPECT_THROW(HostBarrier(-1, pages.fds, pages.pids), std::invalid_argument);
  EXPECT_THROW(HostBarrier(0, pages.fds, nobody), std::invalid_argument);
  const std::vector<int> one_name = {1}, beyond = {1, 4};
  EXPECT_THROW(HostBarrier(0, pages.fds, pages.pids, one_name, 4), std::invalid_argument);
  EXPECT_THROW(HostBarrier(0, pages.fds, pages.pids, beyond, 4), std::invalid_argument);
  const std::vector<int> no_files = {-1, -1}, no_processes = {getpid(), 0};
  EXPECT_THROW(HostBarrier(0, no_files, pages.pids), std::system_error);
  EXPECT_THROW(HostBarrier(0, pages.fds, no_processes), std::system_error);
  const Pages cut(2, HostBarrier::kPageBytes - 1);
  EXPECT_THROW(cut.barrier(0), std::invalid_argument);
  const std::vector<int64_t> terms(HostBarrier::kMaxTerms + 1);
  EXPECT_THROW(pages.barrier(0)->meet("test", terms, 1), std::invalid_argument);
}

#if !defined(__SANITIZE_THREAD__)
/// Rank 1 as a forked child, which meets the others so often and then does `end`.
pid_t fork_rank(Pages& pages, int meetings, void (*end)()) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    pages.pids = {parent, getpid()};
    const auto barrier = pages.barrier(1);
    for (int i = 0; i < meetings; ++i) barrier->meet("child", {}, 60);
    end();
    _exit(0);
  }
  pages.pids = {parent, child};
  return child;
}

TEST(HostBarrier, NoticesAtOnceThatAForkedRankWasKilled) {
  Pages pages(2);
  const pid_t child = fork_rank(pages, 1, [] { pause(); });
  const auto barrier = pages.barrier(0);
  barrier->meet("test", {}, 60);
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(child, SIGKILL);
  });
  std::string error;
  const double seconds =
      seconds_of([&] { error = error_of([&] { barrier->meet("test", {}, 60); }); });
  killer.join();
  EXPECT_EQ(
      error, "test: rank 1 of 2 did not answer: process " + std::to_string(child) + " has ended"
  );
  EXPECT_LT(seconds, 1);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(barrier->ended(), std::vector<int>{1});
}

TEST(HostBarrier, AForkedChildIsNotTheRank) {
  Pages pages(2);
  const pid_t rank = fork_rank(pages, 2, [] {});
  auto barrier = pages.barrier(0);
  barrier->meet("test", {}, 60);
  const pid_t child = fork();
  if (child == 0) {
    const std::string error = error_of([&] { barrier->meet("test", {}, 60); });
    barrier.reset();  // leaves nothing in the name of its parent
    _exit(error.find("forked child") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  barrier->meet("test", {}, 60);
  ASSERT_EQ(waitpid(rank, &status, 0), rank);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace
}  // namespace cpattn
