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
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cpattn/base/check.h"
#include "cpattn/base/trace.h"

namespace cpattn {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::milliseconds(50);

thread_local bool (*interrupt_hook)() = nullptr;

/// Calls of this library that are in the middle of their work on this thread: while one looks
/// for Ctrl-C, a signal handler or the garbage collector may make another.
thread_local int call_depth = 0;

/// While alive, calls of this thread are nested ones, with scratch of their own.
class NestedCalls {
 public:
  NestedCalls() { ++call_depth; }
  ~NestedCalls();
  NestedCalls(const NestedCalls&) = delete;
  NestedCalls& operator=(const NestedCalls&) = delete;
};

/// One parallel_for in flight.
class Job final : public StopToken {
 public:
  Job(int64_t num_items, int num_helpers, ItemFunction function)
      : num_items_(num_items), seats_(num_helpers), function_(function) {
    // Workers that leave must not have to allocate.
    if (posted_.session != 0) waiting_.reserve(num_helpers);
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

  void work() {
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items_ || should_stop()) return;
      try {
        function_(item, *this);
      } catch (...) {
        const std::scoped_lock lock(error_mutex_);
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

  void rethrow() {
    if (error_) std::rethrow_exception(error_);
    if (interrupted_) throw Interrupted();
  }

  int64_t num_items_;
  int seats_;                        // helpers that may still join; guarded by the pool's mutex
  int running_ = 0;                  // helpers inside work(); guarded by the pool's mutex
  std::vector<TracePoint> waiting_;  // helpers that ran out of items; guarded by the pool's mutex

 private:
  ItemFunction function_;
  TracePoint posted_ = trace_here();
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  bool interrupted_ = false;  // written and read by the caller only
  std::thread::id caller_ = std::this_thread::get_id();
  bool (*hook_)() = interrupt_hook;
  Clock::time_point last_poll_ = Clock::now();
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

/// Workers sleep until a job offers a seat. Never destroyed: threads that wait
/// in it at exit must not outlive it, and a forked child leaks its parent's.
class Pool {
 public:
  void run(Job& job) {
    {
      const std::scoped_lock lock(mutex_);
      jobs_.push_back(&job);
      start_workers(job.seats_);
    }
    wake_.notify_all();
    job.work();
    const TracePoint done = trace_here();
    std::unique_lock lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    idle_.wait(lock, [&] { return job.running_ == 0; });
    lock.unlock();
    trace_wait(done);
    for (const TracePoint& since : job.waiting_) trace_wait(since);
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void start_workers(int wanted) {
    while (num_workers_ < wanted) {
      try {
        std::thread(&Pool::worker, this).detach();
      } catch (const std::exception&) {
        // The system is out of threads or memory: those we have do the work. The job is
        // published, so nothing may leave here.
        return;
      }
      ++num_workers_;
    }
  }

  void worker() {
    pthread_setname_np(pthread_self(), "cpattn worker");
    TracePoint done;
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto open = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) {
        return job->seats_ > 0 && job->has_open_items();
      });
      if (open == jobs_.end()) {
        wake_.wait(lock);
        continue;
      }
      Job& job = **open;
      --job.seats_;
      ++job.running_;
      lock.unlock();
      job.trace_late_start(done.time);
      job.work();
      done = trace_here();
      lock.lock();
      if (done.session != 0 && job.waiting_.size() < job.waiting_.capacity()) {
        job.waiting_.push_back(done);
      }
      if (--job.running_ == 0) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Job*> jobs_;
  int num_workers_ = 0;
};

Pool* shared_pool = nullptr;

Pool& pool() {
  static const bool registered = [] {
    shared_pool = new Pool;
    // Workers do not survive a fork. The parent's pool is locked across it, so
    // that the child never sees it half changed, and then replaced.
    pthread_atfork(
        [] { shared_pool->lock(); }, [] { shared_pool->unlock(); }, [] { shared_pool = new Pool; }
    );
    return true;
  }();
  static_cast<void>(registered);
  return *shared_pool;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1U, std::thread::hardware_concurrency());
}

std::atomic<int>& configured_num_threads() {
  static std::atomic<int> num_threads{[] {
    const char* text = std::getenv("CPATTN_NUM_THREADS");
    if (text == nullptr || *text == '\0') return usable_cpus();
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    check(
        *end == '\0' && value >= 1 && value <= 65536,
        "CPATTN_NUM_THREADS must be a number from 1 to 65536, got '", text, "'"
    );
    return static_cast<int>(value);
  }()};
  return num_threads;
}

/// A buffer that only grows.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get(std::size_t bytes) {
    if (bytes_ < bytes) {
      std::free(data_);
      data_ = nullptr;
      bytes_ = 0;
      const std::size_t rounded = (bytes + 63) / 64 * 64;
      data_ = std::aligned_alloc(64, rounded);
      if (data_ == nullptr) throw std::bad_alloc();
      bytes_ = rounded;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// The number of threads for calls of this thread; 0 for that of the process.
thread_local int thread_default = 0;

/// The scratch of calls that are not nested, and of those that are, by their depth.
thread_local Scratch outer_scratch;
thread_local std::vector<std::unique_ptr<Scratch>> nested_scratch;

/// Nested calls are rare: what they used is not kept.
NestedCalls::~NestedCalls() {
  --call_depth;
  if (nested_scratch.size() > static_cast<std::size_t>(call_depth))
    nested_scratch.resize(call_depth);
}

}  // namespace

int default_num_threads() {
  if (thread_default > 0) return thread_default;
  return configured_num_threads().load(std::memory_order_relaxed);
}

int exchange_thread_default(int num_threads) {
  check(num_threads >= 0, "exchange_thread_default: num_threads must be >= 0, got ", num_threads);
  return std::exchange(thread_default, num_threads);
}

void set_num_threads(int num_threads) {
  check(num_threads >= 1, "set_num_threads: num_threads must be >= 1, got ", num_threads);
  configured_num_threads().store(num_threads, std::memory_order_relaxed);
}

InterruptScope::InterruptScope(bool (*hook)()) : previous_(interrupt_hook) {
  interrupt_hook = hook;
}

InterruptScope::~InterruptScope() { interrupt_hook = previous_; }

void parallel_for(int64_t num_items, int num_threads, ItemFunction function) {
  const auto helpers = std::min<int64_t>(num_threads, num_items) - 1;
  Job job(num_items, static_cast<int>(std::max<int64_t>(helpers, 0)), function);
  if (helpers <= 0) {
    job.work();
  } else {
    pool().run(job);
  }
  job.rethrow();
}

void* thread_scratch(std::size_t bytes) {
  if (call_depth == 0) return outer_scratch.get(bytes);
  while (nested_scratch.size() < static_cast<std::size_t>(call_depth)) {
    nested_scratch.push_back(std::make_unique<Scratch>());
  }
  return nested_scratch[call_depth - 1]->get(bytes);
}

}  // namespace cpattn
