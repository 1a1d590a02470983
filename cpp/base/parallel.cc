// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "base/float_control.h"
#include "base/nested_calls.h"
#include "cpattn/base/system.h"
#include "cpattn/base/thread_stack.h"
#include "cpattn/base/trace.h"

namespace cpattn {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::milliseconds(50);
constexpr int kPausesPerLook = 32;  // a microsecond or two

thread_local bool (*interrupt_hook)() = nullptr;

/// One parallel_for in flight.
class Job final : public StopToken {
 public:
  Job(int64_t num_items, int num_helpers, ItemFunction function)
      : num_items_(num_items),
        num_threads_(num_helpers + 1),
        seats_(num_helpers),
        function_(function) {
    // Threads that finish must not allocate.
    if (posted_.session != 0) waiting_.reserve(num_threads_);
  }

  bool should_stop() override {
    if (stop_.load(std::memory_order_relaxed)) return true;
    if (std::this_thread::get_id() != caller_ || hook_ == nullptr) return false;
    const auto now = Clock::now();
    if (now - last_poll_ < kPollInterval) return false;
    last_poll_ = now;
    const NestedCalls nested;
    if (!hook_()) return false;
    interrupted_ = true;
    stop_.store(true, std::memory_order_relaxed);
    return true;
  }

  /// All threads round and treat subnormal numbers like the caller, so that results do not depend
  /// on the thread. The library sets no mode of its own: the caller's hook may run any code during
  /// a call, and callers that ask for subnormal numbers get them.
  void work() {
    const FloatControlScope control(control_);
    const ScratchUse scratch;
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items_ || should_stop()) return;
      try {
        function_(item, *this);
      } catch (...) {
        if (lost_) return;
        const std::scoped_lock lock(mutex_);
        if (!error_) error_ = std::current_exception();
        stop_.store(true, std::memory_order_relaxed);
      }
    }
  }

  bool has_open_items() const { return next_.load(std::memory_order_relaxed) < num_items_; }

  /// Records that a helper joins only now, although it has been free since `free_since`.
  void trace_late_start(int64_t free_since) const {
    TracePoint start = trace_here();
    start.time = std::max(posted_.time, free_since);
    if (start.session == posted_.session) trace_wait(start);
  }

  /// Records that a thread has run out of items while others still work.
  void note_end(const TracePoint& done) {
    if (done.session == 0 || lost_) return;
    const std::scoped_lock lock(mutex_);
    if (waiting_.size() < waiting_.capacity()) waiting_.push_back(done);
  }

  /// Records that these threads have waited until now. Called after all have ended.
  void trace_early_ends() const {
    for (const TracePoint& since : waiting_) trace_wait(since);
  }

  /// Forgets the helpers, in a forked child: threads that ran items are gone, with their unfinished
  /// work and with the mutex, if they held it.
  void lose_helpers() {
    lost_ = running_ != 0;
    if (lost_) stop_.store(true, std::memory_order_relaxed);
    seats_ = 0;
    running_ = 0;
  }

  void rethrow() {
    if (lost_) {
      throw std::runtime_error(
          "a call on several threads was cut short in the child of a fork that a signal handler "
          "made in the middle of it"
      );
    }
    if (error_) std::rethrow_exception(error_);
    if (interrupted_) throw Interrupted();
  }

  int64_t num_items_;
  int num_threads_;              // including the caller's
  int seats_;                    // helpers that may still join; guarded by the pool's mutex
  std::atomic<int> running_{0};  // helpers inside work(); changed under the pool's mutex

 private:
  ItemFunction function_;
  uint64_t control_ = float_control();
  TracePoint posted_ = trace_here();
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  bool interrupted_ = false;  // written and read by the caller only
  bool lost_ = false;         // likewise
  std::thread::id caller_ = std::this_thread::get_id();
  bool (*hook_)() = interrupt_hook;
  Clock::time_point last_poll_ = Clock::now();
  std::mutex mutex_;                 // guards the next two
  std::vector<TracePoint> waiting_;  // threads that ran out of items
  std::exception_ptr error_;
};

/// Tells the processor that this thread waits for another.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Polls `condition` until it is true or time is up; returns whether it is true. Other threads that
/// want this CPU get it after one or two microseconds instead of a scheduler's time slice.
template <class Condition>
bool spin_until(Clock::time_point end, Condition condition) {
  while (Clock::now() < end) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (condition()) return true;
      relax();
    }
    sched_yield();
  }
  return condition();
}

/// The pool of worker threads. It is never destroyed: threads that wait in it at exit must not
/// outlive it, and a forked child leaks its parent's.
///
/// A worker that runs out of items spins for a while before it sleeps: the next job may be
/// microseconds away, and waking takes longer than many jobs. No job is missed in between: under
/// the mutex a worker remembers the number of posted jobs when it finds none, and under the mutex
/// it sleeps only if that number has not changed.
class Pool {
 public:
  void run(Job& job) {
    const auto spin = std::chrono::microseconds(spin_us());
    std::unique_lock lock = locked();
    jobs_.push_back(&job);
    ++callers_;
    start_workers(job.seats_);
    ++posted_;
    const int wakes = needed_sleepers();
    const bool all = wakes == sleeping_;
    lock.unlock();
    wake(wakes, all);
    job.work();
    job.note_end(trace_here());
    lock = locked();
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    if (job.running_ != 0) {
      const auto ended = [&] { return job.running_.load(std::memory_order_acquire) == 0; };
      const int threads = std::max(job.num_threads_, num_awake());
      lock.unlock();
      if (threads > num_cpus_ || !spin_until(Clock::now() + spin, ended)) {
        lock.lock();
        idle_.wait(lock, ended);
      }
    }
    if (lock.owns_lock()) lock.unlock();
    --callers_;
    job.trace_early_ends();
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

  /// Ends the parent's jobs in a forked child and unlocks the mutex: only a caller that forked
  /// during its own calls looks at this pool again.
  void lose_workers() {
    for (Job* job : jobs_) job->lose_helpers();
    mutex_.unlock();
  }

 private:
  /// Spins for the mutex, which is held for less time than falling asleep takes.
  std::unique_lock<std::mutex> locked() {
    std::unique_lock lock(mutex_, std::try_to_lock);
    for (int i = 0; i < kPausesPerLook && !lock.owns_lock(); ++i) {
      relax();
      static_cast<void>(lock.try_lock());
    }
    if (!lock.owns_lock()) lock.lock();
    return lock;
  }

  /// Starts fewer workers if the system is out of threads or memory: the others do the work. The
  /// job is published, so no exception may leave.
  void start_workers(int wanted) {
    while (num_workers_ < wanted && start_worker()) ++num_workers_;
  }

  /// Returns whether a worker could be started.
  bool start_worker() {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, kWorkerStack);
    const auto work = [](void* pool) -> void* {
      static_cast<Pool*>(pool)->worker();
      return nullptr;
    };
    pthread_t thread;
    const bool started = pthread_create(&thread, &attributes, work, this) == 0;
    pthread_attr_destroy(&attributes);
    return started;
  }

  /// The number of sleeping workers that open seats need, besides the workers that look for a seat
  /// by themselves.
  int needed_sleepers() const {
    int seats = -looking_;
    for (const Job* job : jobs_) seats += job->has_open_items() ? job->seats_ : 0;
    return std::clamp(seats, 0, sleeping_);
  }

  void wake(int count, bool all) {
    if (all && count > 1) {
      wake_.notify_all();
    } else {
      for (int i = 0; i < count; ++i) wake_.notify_one();
    }
  }

  /// The number of threads that want a CPU. A caller may have left the pool, but it has not ended.
  int num_awake() const { return std::max(callers_.load(), 1) + num_workers_ - sleeping_; }

  /// Waits until a job is posted, spinning if there is a CPU for each thread of the last job and
  /// each thread that is awake.
  void wait_for_jobs(std::unique_lock<std::mutex>& lock, Clock::time_point spin_end, int threads) {
    const uint64_t seen = posted_;
    const auto news = [&] { return posted_.load(std::memory_order_acquire) != seen; };
    if (Clock::now() < spin_end) {
      ++looking_;
      threads = std::max(threads, num_awake());
      lock.unlock();
      // A worker knows the CPUs of the pool best: engines bind only the caller to one of them.
      num_cpus_ = usable_cpus();
      if (threads <= num_cpus_) spin_until(spin_end, news);
      lock = locked();
      --looking_;
    }
    ++sleeping_;
    wake_.wait(lock, news);
    --sleeping_;
  }

  void worker() {
    system::name_thread("cpattn worker");
    TracePoint done;
    Clock::time_point spin_end;  // long ago, before the first job
    int threads_of_last = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) {
        return job->seats_ > 0 && job->has_open_items();
      });
      if (open == jobs_.end()) {
        wait_for_jobs(lock, spin_end, threads_of_last);
        continue;
      }
      Job& job = **open;
      threads_of_last = job.num_threads_;
      --job.seats_;
      ++job.running_;
      lock.unlock();
      job.trace_late_start(done.time);
      job.work();
      done = trace_here();
      spin_end = Clock::now() + std::chrono::microseconds(spin_us());
      job.note_end(done);
      lock = locked();
      // The worker's last use of the job, whose caller may be waiting.
      if (job.running_.fetch_sub(1, std::memory_order_acq_rel) == 1) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Job*> jobs_;
  int num_workers_ = 0;
  int looking_ = 0;                  // workers that will look for a job without being woken
  int sleeping_ = 0;                 // workers that have to be woken
  std::atomic<uint64_t> posted_{0};  // jobs so far; changed under the mutex
  std::atomic<int> callers_{0};
  std::atomic<int> num_cpus_{usable_cpus()};
};

// Made when the library is loaded, since a fork while a thread makes it would leave a child that
// waits for that thread.
Pool* pool = new Pool;

// Workers do not survive a fork. The parent's pool is locked across it, so that the child never
// sees it half changed, and then replaced.
[[maybe_unused]] const int pool_is_registered = pthread_atfork(
    [] { pool->lock(); },
    [] { pool->unlock(); },
    [] {
      pool->lose_workers();
      pool = new Pool;
    }
);

/// Runs a job on the caller's thread and on the threads of a team that it has seats for; the other
/// threads of the team return at once.
void run_in_team(Job& job, GompParallel start) {
  struct Team {
    Job& job;
    std::thread::id caller;
    std::atomic<int> seats;
  } team{job, std::this_thread::get_id(), job.seats_};
  const auto work = [](void* data) {
    auto& [own, caller, seats] = *static_cast<Team*>(data);
    if (std::this_thread::get_id() == caller) {
      own.work();
    } else if (seats.fetch_sub(1, std::memory_order_relaxed) > 0) {
      own.trace_late_start(0);
      own.work();
    } else {
      return;
    }
    own.note_end(trace_here());
  };
  start(work, &team, 0, 0);  // of the size that the team has: another would start threads anew
  job.trace_early_ends();
}

}  // namespace

InterruptScope::InterruptScope(bool (*hook)()) : previous_(interrupt_hook) {
  interrupt_hook = hook;
}

InterruptScope::~InterruptScope() { interrupt_hook = previous_; }

bool interrupt_requested() {
  if (interrupt_hook == nullptr) return false;
  const NestedCalls nested;
  return interrupt_hook();
}

void parallel_for(int64_t num_items, int num_threads, ItemFunction function) {
  const auto helpers = std::min<int64_t>(num_threads, num_items) - 1;
  Job job(num_items, static_cast<int>(std::max<int64_t>(helpers, 0)), function);
  if (helpers <= 0) {
    job.work();
  } else if (const GompParallel start = openmp()) {
    run_in_team(job, start);
  } else {
    pool->run(job);
  }
  job.rethrow();
}

}  // namespace cpattn
