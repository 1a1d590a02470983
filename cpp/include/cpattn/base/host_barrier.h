// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cpattn {

/// A barrier for the processes of a group that run on one host.
///
/// Every rank has a page of shared memory that all ranks map. It counts the rank's arrivals and
/// holds a few integers that the rank shows the others on arrival. A rank writes only its own page,
/// so a killed rank leaves nothing half done. A rank that waits for others spins for spin_us(),
/// then sleeps on a futex, and wakes fifty times a second to look for ranks that have died.
///
/// A rank that leaves a meeting by an error has left for good: its barrier throws from then on. The
/// barriers of the others throw at that meeting, or at the next one if they have completed it. One
/// thread at a time may use a barrier.
///
/// A group may span several hosts, each with a barrier of its own. Errors name ranks by their
/// numbers in the group.
class HostBarrier {
 public:
  static constexpr int64_t kPageBytes = 4096;
  static constexpr std::size_t kMaxTerms = 32;

  /// The ranks for which a meeting waited in vain, and the reason.
  struct Loss {
    std::vector<int> ranks;  // of the group, also of other hosts
    std::string reason;
    bool timed_out = false;  // the ranks may have waited for others
  };

  /// Maps fds[r], a file with the page of rank r: kPageBytes bytes, zero before the first meeting.
  /// The caller may close it afterwards. pids[r] is the process of rank r as this process sees it,
  /// names[r] the rank's number in a group of `group_size` ranks; without names it is r in a group
  /// of fds.size(). Throws std::invalid_argument for a rank without a file, files that are too
  /// small, unequal numbers of files, processes and names, and names that are no ranks of the
  /// group, and std::system_error if a page cannot be mapped or a process cannot be watched.
  HostBarrier(
      int rank,
      std::span<const int> fds,
      std::span<const int> pids,
      std::span<const int> names = {},
      int group_size = 0
  );
  ~HostBarrier();
  HostBarrier(const HostBarrier&) = delete;
  HostBarrier& operator=(const HostBarrier&) = delete;

  /// Waits until all ranks have called meet() as often as this rank. Returns the terms of all
  /// ranks, rank 0's first; every rank passes the same number of terms, at most kMaxTerms. On
  /// return this rank sees whatever the others wrote into shared memory before they called meet().
  ///
  /// Throws std::runtime_error, which begins with `call` and names the lost ranks, if a rank has
  /// ended, has left before it arrived or does not arrive within `timeout` seconds; also if this
  /// rank has left, and in a forked child, which is not the rank. Throws Interrupted when the
  /// caller's hook asks to stop. While this rank waits, it calls `give_up` fifty times a second; if
  /// that returns true, the awaited ranks are lost without a reason.
  std::vector<int64_t> meet(
      const std::string& call,
      std::span<const int64_t> terms,
      double timeout,
      const std::function<bool()>& give_up = {}
  );

  /// Tells the others not to wait for this rank at the next meeting. If `because_of` is a rank of
  /// the group that this rank has lost, the others' errors name that rank instead of this one.
  void leave(int because_of = -1);

  /// The other ranks on this host whose processes have ended, by their numbers in the group.
  std::vector<int> ended() const;

  /// The loss of the meeting that threw because ranks did not come; no ranks if no meeting did.
  const Loss& loss() const { return loss_; }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pages_.size()); }

 private:
  struct Page;
  class Peer;

  void leave_as(bool others, int because_of);
  bool has_arrived(int rank, uint64_t count) const;
  bool all_have_arrived(uint64_t count) const;
  bool spin(uint64_t count) const;
  void wait(
      const std::string& call, uint64_t count, double timeout, const std::function<bool()>& give_up
  );
  void refuse_lost(const std::string& call, uint64_t count);
  [[noreturn]] void lose(const std::string& call, Loss loss);

  int rank_;
  std::vector<int> names_;
  int group_size_;
  Loss loss_;
  pid_t owner_;
  int num_cpus_;
  uint64_t completed_ = 0;  // meetings
  std::vector<Page*> pages_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null for this rank
};

}  // namespace cpattn
