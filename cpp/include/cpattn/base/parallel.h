// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <type_traits>

namespace cpattn {

/// The CPUs that the calling thread may run on.
int usable_cpus();

/// Threads that a call may use when it names no number: exchange_thread_default() of the
/// calling thread, else set_num_threads(), else the environment variable
/// CPATTN_NUM_THREADS, else the CPUs this process may run on. Throws
/// std::invalid_argument when the variable is not a positive number.
int default_num_threads();
/// Throws std::invalid_argument for a number below 1.
void set_num_threads(int num_threads);

/// Returns num_threads of a call. Throws std::invalid_argument, which names `function`, below 1.
int check_num_threads(const char* function, int num_threads);

/// Sets the default number of threads for calls of this thread, 0 for the default of the process,
/// and returns the previous one. Throws std::invalid_argument below 0.
int exchange_thread_default(int num_threads);

/// Microseconds that an idle thread of the pool, and a caller that waits for the last busy one,
/// spin before they sleep: set_spin_us(), else the environment variable CPATTN_SPIN_US, else 50.
/// They sleep at once while more threads are awake, or requested, than the process has usable CPUs.
/// Throws std::invalid_argument when the variable is not a number from 0 to 1000000.
int spin_us();
/// Throws std::invalid_argument for a number that is not from 0 to 1000000.
void set_spin_us(int microseconds);

/// GOMP_parallel, which every OpenMP runtime on Linux has: runs work(data) on the calling thread
/// and on the others of its team, num_threads in all (0: as many as the runtime is set to). Returns
/// when all have finished.
using GompParallel =
    void (*)(void (*work)(void*), void* data, unsigned num_threads, unsigned flags);

/// Makes the calls of the whole process run on the threads of an OpenMP runtime; nullptr restores
/// the pool. It is meant for programs that run OpenMP between the calls, as torch does: the OpenMP
/// threads are then awake, and threads of the pool would have to wait for CPUs. A call runs on at
/// most the threads of its caller's team. OpenMP does not survive a fork: a child uses the pool.
void set_openmp(GompParallel start);
/// The runtime that set_openmp() has set, or nullptr.
GompParallel openmp();

/// Thrown by parallel_for when the caller's interrupt hook asked to stop.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

/// While alive, calls of this thread poll `hook` about every 50 ms of work and
/// end with Interrupted once it returns true. The bindings install one that
/// looks for Ctrl-C; the core does not know Python.
class InterruptScope {
 public:
  explicit InterruptScope(bool (*hook)());
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  bool (*previous_)();
};

/// Whether the hook of the calling thread asks to stop. Waits outside parallel_for poll it a few
/// times a second and throw Interrupted.
bool interrupt_requested();

/// The signal by which the running items of one parallel_for end early. Long items call
/// should_stop() now and then and return early when it is true. Inside should_stop() the hook may
/// run any code on this thread, including calls of this library. Such nested calls have their own
/// scratch, but they overwrite vector and tile registers.
class StopToken {
 public:
  virtual bool should_stop() = 0;

 protected:
  ~StopToken() = default;
};

/// Non-owning reference to a callable void(int64_t item, StopToken&).
class ItemFunction {
 public:
  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, ItemFunction>)
  ItemFunction(F&& function)  // NOLINT: implicit by design, like std::function_ref
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
        call_([](void* object, int64_t item, StopToken& stop) {
          (*static_cast<std::remove_reference_t<F>*>(object))(item, stop);
        }) {}
  void operator()(int64_t item, StopToken& stop) const { call_(object_, item, stop); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, StopToken&);
};

/// Runs function(item, stop) for every item in [0, num_items), handed out in
/// order by one shared counter, on the calling thread and at most
/// num_threads - 1 threads of a pool that all calls share, or of OpenMP. With num_threads 1 a call
/// uses neither. Calls from several threads share the workers; a call that finds none free does all
/// the work itself. All threads have the control bits of the caller's floating-point unit. Safe
/// after fork(): the child starts a pool of its own, and calls that the fork cut off throw
/// std::runtime_error in the child if threads of the pool were running their items. The first
/// exception of an item is rethrown here after the others have ended.
void parallel_for(int64_t num_items, int num_threads, ItemFunction function);

/// Returns a 64-byte aligned buffer of this thread, at least `bytes` large. Its contents are
/// undefined. The next thread_scratch() of this thread invalidates it, and so does the end of the
/// outermost parallel_for, which keeps up to 16 MiB for the next; calls nested in should_stop() do
/// not. Throws a std::bad_alloc that says how much `function` asked for.
void* thread_scratch(const char* function, std::size_t bytes);

}  // namespace cpattn
