// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace cpattn {

/// Where the processes of a group meet that run on one host.
///
/// Every rank has a page of shared memory that all map: how often it has arrived, and a few
/// integers that it shows the others when it does. A rank writes its own page alone, so one that
/// is killed leaves nothing half done. Whoever finds others missing looks for them for spin_us(),
/// then sleeps on a futex, and wakes a few times a second to look for ranks that have died.
///
/// A rank that leaves a meeting by an error has left for good: its barrier throws from then on, and
/// the others are told, at that meeting where they are still on their way to it. For one thread at
/// a time.
class HostBarrier {
 public:
  static constexpr int64_t kPageBytes = 4096;
  static constexpr std::size_t kMaxTerms = 32;

  /// fds[r] is a file with the page of rank r, of kPageBytes and zero before the first meeting;
  /// it is mapped, and may be closed then. pids[r] is the process of rank r, as this one knows it.
  /// Throws std::invalid_argument for a rank that is none of them, files that are too small and
  /// other numbers of files and processes, and std::system_error if a page cannot be mapped or a
  /// process not be watched.
  HostBarrier(int rank, std::span<const int> fds, std::span<const int> pids);
  ~HostBarrier();
  HostBarrier(const HostBarrier&) = delete;
  HostBarrier& operator=(const HostBarrier&) = delete;

  /// Waits until all ranks have called this as often as this one. Returns what they brought, terms
  /// of rank 0 first; all bring the same number, kMaxTerms at most. What a rank has written into
  /// shared memory before is seen by all behind it.
  ///
  /// Throws std::runtime_error, which begins with `call`, if a rank has ended or has left before it
  /// arrived, or does not arrive within `timeout` seconds, naming it; for a rank that has left
  /// itself; and in a forked child, which is not the rank. Throws Interrupted when the caller's
  /// hook asks to stop.
  std::vector<int64_t> meet(
      const std::string& call, std::span<const int64_t> terms, double timeout
  );

  /// Tells the others not to wait for this rank at the next meeting.
  void leave();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(pages_.size()); }

 private:
  struct Page;
  class Peer;

  void leave_as(bool others);
  bool has_arrived(int rank, uint64_t count) const;
  bool all_have_arrived(uint64_t count) const;
  bool spin(uint64_t count) const;
  void wait(const std::string& call, uint64_t count, double timeout);
  void refuse_lost(const std::string& call, uint64_t count) const;

  int rank_;
  pid_t owner_;
  int num_cpus_;
  uint64_t completed_ = 0;  // meetings
  std::vector<Page*> pages_;
  std::vector<std::unique_ptr<Peer>> peers_;  // null for this rank
};

}  // namespace cpattn
