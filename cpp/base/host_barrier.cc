// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/host_barrier.h"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cpattn/base/check.h"
#include "cpattn/base/parallel.h"
#include "cpattn/base/system.h"

namespace cpattn {
namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(20);  // of a sleep between two checks

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = "rank ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

/// The page of a rank, all zeros before its first arrival.
struct HostBarrier::Page {
  alignas(64) std::atomic<uint64_t> arrivals;
  std::atomic<uint64_t> left_at;          // the first meeting that it did not complete; 0 for none
  std::atomic<uint32_t> left_as_others;   // 1: it left because of lost ranks, which errors name
  std::atomic<uint32_t> left_because_of;  // the lost rank, its number in the group plus 1; 0: none
  // Used on rank 0's page only: completions changes when a meeting is complete, and sleepers counts
  // the ranks that sleep on it.
  alignas(64) std::atomic<uint32_t> completions;
  std::atomic<uint32_t> sleepers;
  // Terms of the last two meetings: a rank at the next meeting keeps the terms of this one, which
  // others may still read. No rank is two meetings ahead.
  alignas(64) int64_t terms[2][kMaxTerms];

  static Page* map(int rank, int fd) {
    struct stat file{};
    if (fstat(fd, &file) != 0) throw_errno(concat("HostBarrier: page of rank ", rank));
    check(
        file.st_size >= kPageBytes, "HostBarrier: the page of rank ", rank, " must have ",
        kPageBytes, " bytes, got ", file.st_size
    );
    void* const data = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) throw_errno(concat("HostBarrier: page of rank ", rank));
    return static_cast<Page*>(data);
  }
};

/// The process of another rank.
class HostBarrier::Peer {
 public:
  Peer(int rank, pid_t pid) : pid_(pid), fd_(system::open_process(pid)) {
    if (fd_ < 0) throw_errno(concat("HostBarrier: process ", pid, " of rank ", rank));
  }
  ~Peer() { close(fd_); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  pid_t pid() const { return pid_; }
  bool has_ended() const {
    pollfd look{.fd = fd_, .events = POLLIN, .revents = 0};
    return poll(&look, 1, 0) == 1;
  }

 private:
  pid_t pid_;
  int fd_;
};

HostBarrier::HostBarrier(
    int rank,
    std::span<const int> fds,
    std::span<const int> pids,
    std::span<const int> names,
    int group_size
)
    : rank_(rank),
      names_(names.begin(), names.end()),
      group_size_(group_size),
      owner_(getpid()),
      num_cpus_(usable_cpus()) {
  static_assert(sizeof(Page) <= kPageBytes);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const int size = static_cast<int>(fds.size());
  check(
      fds.size() == pids.size(), "HostBarrier: there must be a process for each of ", size,
      " pages, got ", pids.size()
  );
  check(rank >= 0 && rank < size, "HostBarrier: rank must be in [0, ", size, "), got ", rank);
  if (names.empty()) {
    names_.resize(size);
    std::iota(names_.begin(), names_.end(), 0);
    group_size_ = size;
  }
  check(
      std::ssize(names_) == size, "HostBarrier: there must be a name for each of ", size,
      " pages, got ", names_.size()
  );
  for (const int name : names_) {
    check(
        name >= 0 && name < group_size_, "HostBarrier: names must be in [0, ", group_size_,
        "), got ", name
    );
  }
  try {
    for (int r = 0; r < size; ++r) {
      pages_.push_back(nullptr);
      pages_.back() = Page::map(r, fds[r]);
      peers_.push_back(r == rank ? nullptr : std::make_unique<Peer>(r, pids[r]));
    }
  } catch (...) {
    for (Page* page : pages_) {
      if (page != nullptr) munmap(page, kPageBytes);
    }
    throw;
  }
}

HostBarrier::~HostBarrier() {
  leave();
  for (Page* page : pages_) munmap(page, kPageBytes);
}

void HostBarrier::leave(int because_of) { leave_as(because_of >= 0, because_of); }

std::vector<int> HostBarrier::ended() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && peers_[rank]->has_ended()) ranks.push_back(names_[rank]);
  }
  return ranks;
}

void HostBarrier::leave_as(bool others, int because_of) {
  Page& own = *pages_[rank_];
  if (getpid() != owner_ || own.left_at.load() != 0) return;
  own.left_as_others.store(others ? 1 : 0);
  own.left_because_of.store(because_of >= 0 && because_of < group_size_ ? because_of + 1 : 0);
  own.left_at.store(completed_ + 1);
}

bool HostBarrier::has_arrived(int rank, uint64_t count) const {
  return pages_[rank]->arrivals.load() >= count;
}

bool HostBarrier::all_have_arrived(uint64_t count) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (!has_arrived(rank, count)) return false;
  }
  return true;
}

std::vector<int64_t> HostBarrier::meet(
    const std::string& call,
    std::span<const int64_t> terms,
    double timeout,
    const std::function<bool()>& give_up
) {
  check(
      terms.size() <= kMaxTerms, call, ": there must be at most ", kMaxTerms, " terms, got ",
      terms.size()
  );
  if (getpid() != owner_) {
    throw std::runtime_error(concat(
        call, ": rank ", names_[rank_], " is process ", owner_, "; its forked child ", getpid(),
        " cannot take part"
    ));
  }
  Page& own = *pages_[rank_];
  if (own.left_at.load() != 0) {
    throw std::runtime_error(concat(
        call, ": the group cannot be used any more, rank ", names_[rank_],
        " has left it by an error"
    ));
  }
  const uint64_t count = completed_ + 1;
  std::copy(terms.begin(), terms.end(), own.terms[count % 2]);
  own.arrivals.store(count);
  try {
    // Sequentially consistent: the last rank to store sees that all have stored, and wakes the
    // others.
    if (all_have_arrived(count)) {
      Page& first = *pages_[0];
      first.completions.fetch_add(1);
      if (first.sleepers.load() != 0) system::wake_all(first.completions);
    } else if (!spin(count)) {
      wait(call, count, timeout, give_up);
    }
    refuse_lost(call, count);
  } catch (const std::runtime_error&) {
    leave_as(true, -1);
    throw;
  } catch (...) {
    leave();
    throw;
  }
  completed_ = count;
  std::vector<int64_t> all;
  all.reserve(terms.size() * pages_.size());
  for (const Page* page : pages_) {
    const int64_t* const theirs = page->terms[count % 2];
    all.insert(all.end(), theirs, theirs + terms.size());
  }
  return all;
}

/// Whether all arrive before it is time to sleep. If ranks share CPUs, the awaited rank may need
/// the CPU of this one.
bool HostBarrier::spin(uint64_t count) const {
  const int pauses = size() <= num_cpus_ ? 32 : 1;  // one or two microseconds, or one check
  const auto end = SteadyClock::now() + std::chrono::microseconds(spin_us());
  while (SteadyClock::now() < end) {
    for (int i = 0; i < pauses; ++i) {
      if (all_have_arrived(count)) return true;
      pause_cpu();
    }
    sched_yield();
  }
  return all_have_arrived(count);
}

void HostBarrier::wait(
    const std::string& call, uint64_t count, double timeout, const std::function<bool()>& give_up
) {
  const auto begin = SteadyClock::now();
  Page& first = *pages_[0];
  for (;;) {
    refuse_lost(call, count);
    first.sleepers.fetch_add(1);
    const uint32_t seen = first.completions.load();
    // A rank that completes the meeting after this check sees the sleeper, or changes `seen`.
    const bool complete = all_have_arrived(count);
    if (!complete) system::wait_while(first.completions, seen, kSlice);
    first.sleepers.fetch_sub(1);
    if (complete || all_have_arrived(count)) return;
    if (interrupt_requested()) throw Interrupted();
    const std::chrono::duration<double> waited = SteadyClock::now() - begin;
    const bool is_over = waited.count() >= timeout;
    if (!is_over && !(give_up && give_up())) continue;
    std::vector<int> late;
    for (int rank = 0; rank < size(); ++rank) {
      if (!has_arrived(rank, count)) late.push_back(names_[rank]);
    }
    if (late.empty()) return;
    const std::string reason = is_over ? concat("timed out after ", timeout, " s") : "";
    lose(call, {std::move(late), reason, true});
  }
}

/// Throws if a rank has left this meeting, or has ended and will never arrive. Names ended ranks;
/// if there are none, the ranks that others left because of; else the ranks that left.
void HostBarrier::refuse_lost(const std::string& call, uint64_t count) {
  const bool complete = all_have_arrived(count);
  std::vector<int> ended, left, missed;
  std::string end_reason, leave_reason, miss_reason;
  const auto add =
      [this](std::vector<int>& ranks, std::string& reason, int lost, int teller, const char* what) {
        if (std::find(ranks.begin(), ranks.end(), lost) == ranks.end()) ranks.push_back(lost);
        reason += reason.empty() ? "process " : ", process ";
        reason += concat(peers_[teller]->pid(), what);
      };
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    const Page& page = *pages_[rank];
    const uint64_t left_at = page.left_at.load();
    const bool has_left =
        left_at != 0 && left_at <= count &&
        (complete || page.left_as_others.load() == 0 || !has_arrived(rank, count));
    const int because_of = static_cast<int>(page.left_because_of.load()) - 1;
    if (has_left && because_of >= 0 && because_of != names_[rank_]) {
      add(missed, miss_reason, because_of, rank, " has left because of it");
    } else if (
        !has_arrived(rank, count) && peers_[rank]->has_ended() && !has_arrived(rank, count)
    ) {
      add(ended, end_reason, names_[rank], rank,
          " has ended");  // without arriving
    } else if (has_left) {
      add(left, leave_reason, names_[rank], rank, " has left by an error");
    }
  }
  const auto refuse = [&](const std::vector<int>& ranks, const std::string& reason) {
    if (!ranks.empty()) lose(call, {ranks, reason});
  };
  refuse(ended, end_reason);
  refuse(missed, miss_reason);
  refuse(left, leave_reason);
}

void HostBarrier::lose(const std::string& call, Loss loss) {
  loss_ = std::move(loss);
  throw std::runtime_error(concat(
      call, ": ", ranks_text(loss_.ranks), " of ", group_size_, " did not answer: ", loss_.reason
  ));
}

}  // namespace cpattn
