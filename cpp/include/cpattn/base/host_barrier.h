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

/// A barrier for those processes of a group that run on one host.
///
/// Every rank has a page of shared memory that all map: how often it has arrived, and a few
/// integers that it shows the others when it does. A rank writes its own page alone, so one that
/// is killed leaves nothing half done. A rank that waits for others spins for spin_us(), then
/// sleeps on a futex, and wakes fifty times a second to look for ranks that have died.
///
/// A rank that leaves a meeting by an error has left for good: its barrier throws from then on, and
/// those of the others throw at that meeting, or at the next if they have completed it. One thread
/// at a time may use a barrier.
///
/// A group may span several hosts, each with a barrier of its own. Errors name ranks by their
/// numbers in the group.
class HostBarrier {
 public:
  static constexpr int64_t kPageBytes = 4096;
  static constexpr std::size_t kMaxTerms = 32;

  /// Ranks for which a meeting was in vain, and the reason.
  struct Loss {
    std::vector<int> ranks;  // of the group, also of other hosts
    std::string reason;
    bool timed_out = false;  // they may only have waited for somebody else
  };

  /// Maps fds[r], a file with the page of rank r, of kPageBytes and zero before the first meeting;
  /// it may be closed then. pids[r] is the process of rank r, as this one knows it, names[r] its
  /// number in a group of `group_size` ranks; without names it is r in a group of fds.size().
  /// Throws std::invalid_argument for a rank without a file, files that are too small, unequal
  /// numbers of files, processes and names, and names that are no ranks of the group, and
  /// std::system_error if a page cannot be mapped or a process cannot be watched.
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

  /// Waits until all ranks have called this as often as this one. Returns the terms of all, rank
  /// 0's first; all bring the same number, kMaxTerms at most. Once this returns, a rank sees
  /// whatever others wrote into shared memory before they called it.
  ///
  /// Throws std::runtime_error, which begins with `call`, if a rank has ended or has left before it
  /// arrived, or does not arrive within `timeout` seconds, naming it; if this rank has left; and in
  /// a forked child, which is not the rank. Throws Interrupted when the caller's hook asks to stop.
  /// `give_up` is called fifty times a second while others are awaited; if it returns true, they
  /// are lost without a reason.
  std::vector<int64_t> meet(
      const std::string& call,
      std::span<const int64_t> terms,
      double timeout,
      const std::function<bool()>& give_up = {}
  );

  /// Tells the others not to wait for this rank at the next meeting. If `because_of` is a rank of
  /// the group, which this one has lost, their errors name it instead of this one.
  void leave(int because_of = -1);

  /// The other ranks here whose processes have ended, by their numbers in the group.
  std::vector<int> ended() const;

  /// The loss of the meeting that threw because ranks did not come; without ranks if none did.
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
