// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/trace.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <span>
#include <stdexcept>

#include "cpattn/base/check.h"
#include "cpattn/base/system.h"

namespace cpattn {
namespace {

/// Nonzero while a trace is on; each trace has another number.
std::atomic<uint64_t> active_session{0};

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch()
  )
      .count();
}

/// A TraceEvent with clock times and the name itself.
struct Record {
  int64_t begin, end, flops;
  const char* function;
  TraceScope scope;
  DType dtype;
  uint16_t thread;
};

/// One thread writes a buffer; the thread that ends the trace reads it.
class Buffer {
 public:
  Buffer(int64_t capacity, uint16_t thread)
      : records_(new Record[capacity]), capacity_(capacity), thread_(thread) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    name_ = name;
  }

  void append(const Record& record) {
    const int64_t count = count_.load(std::memory_order_relaxed);
    if (count == capacity_) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    records_[count] = record;
    count_.store(count + 1, std::memory_order_release);
  }

  uint16_t thread() const { return thread_; }
  std::span<const Record> records() const {
    return {records_.get(), static_cast<std::size_t>(count_.load(std::memory_order_acquire))};
  }
  TraceThread description() const { return {name_, id_, dropped_.load(std::memory_order_relaxed)}; }

 private:
  // Pages that are never written cost nothing, so the array is not grown.
  const std::unique_ptr<Record[]> records_;
  const int64_t capacity_;
  const uint16_t thread_;
  const int64_t id_ = system::thread_id();
  std::string name_;
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> dropped_{0};
};

/// The trace that is on. Its buffers are shared with their threads, which may
/// be in the middle of a record when it ends.
struct Session {
  std::mutex mutex;
  uint64_t last = 0;
  int64_t begin = 0;
  int64_t max_events = 0;
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::set<std::string> functions;  // of all traces: records point into it
};

// Made when the library is loaded, as the pool of threads is.
Session& session = []() -> Session& {
  static auto* const made = new Session;  // threads may outlive the static objects
  pthread_atfork(
      [] { made->mutex.lock(); }, [] { made->mutex.unlock(); },
      [] {
        active_session.store(0, std::memory_order_relaxed);
        made->mutex.unlock();
      }
  );
  return *made;
}();

/// A copy of the name that lives as long as the process; null if there is no memory for it.
const char* interned(const char* name) {
  if (name == nullptr) return nullptr;
  const std::scoped_lock lock(session.mutex);
  try {
    return session.functions.emplace(name).first->c_str();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

/// The state of a thread: the trace that it last recorded for.
struct ThreadState {
  uint64_t session = 0;
  std::shared_ptr<Buffer> buffer;
  Record mark{};  // without end; begin 0: none

  void end_mark(int64_t time) {
    if (mark.begin == 0) return;
    mark.end = time;
    buffer->append(mark);
    mark.begin = 0;
  }
};

/// The state of this thread, with a buffer for trace `id`. Null if that trace is not on, or if
/// there is no memory for a buffer: the thread is then missing from the trace.
ThreadState* state_in(uint64_t id) {
  if (id == 0) return nullptr;
  thread_local ThreadState state;
  if (state.session == id) return &state;
  const std::scoped_lock lock(session.mutex);
  if (active_session.load(std::memory_order_relaxed) != id) return nullptr;
  auto& buffers = session.buffers;
  if (buffers.size() > UINT16_MAX) return nullptr;
  try {
    buffers.push_back(
        std::make_shared<Buffer>(session.max_events, static_cast<uint16_t>(buffers.size()))
    );
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  state = {id, buffers.back(), {}};
  return &state;
}

/// The index of a name, which is appended when it is new.
uint16_t index_of(std::vector<std::string>& names, const char* name) {
  const auto index = std::find(names.begin(), names.end(), name) - names.begin();
  if (index == std::ssize(names)) names.emplace_back(name);
  return static_cast<uint16_t>(index);
}

}  // namespace

bool tracing() { return active_session.load(std::memory_order_relaxed) != 0; }

void start_trace(int64_t max_events) {
  check(max_events >= 1, "profile: max_events must be >= 1, got ", max_events);
  const std::scoped_lock lock(session.mutex);
  if (tracing()) {
    throw std::runtime_error(
        "profile: another profile of this process is running; they do not nest, nor run side by "
        "side"
    );
  }
  session.buffers.clear();  // of a parent process
  session.max_events = max_events;
  session.begin = now();
  active_session.store(++session.last, std::memory_order_relaxed);
}

Trace stop_trace() {
  const std::scoped_lock lock(session.mutex);
  if (!tracing()) throw std::runtime_error("profile: none is running in this process");
  active_session.store(0, std::memory_order_relaxed);
  const int64_t begin = session.begin;
  Trace trace{.nanoseconds = now() - begin};
  for (const auto& buffer : session.buffers) {
    trace.threads.push_back(buffer->description());
    for (const Record& record : buffer->records()) {
      trace.events.push_back({
          .begin = record.begin - begin,
          .end = record.end - begin,
          .flops = record.flops,
          .scope = record.scope,
          .dtype = record.dtype,
          .thread = record.thread,
          .function =
              record.function == nullptr ? uint16_t{0} : index_of(trace.functions, record.function),
      });
    }
  }
  session.buffers.clear();
  return trace;
}

TraceSpan::TraceSpan(TraceScope scope, int64_t flops, DType dtype, const char* function)
    : session_(active_session.load(std::memory_order_relaxed)),
      flops_(flops),
      scope_(scope),
      dtype_(dtype),
      function_(function) {
  if (session_ == 0) return;
  function_ = interned(function);
  begin_ = now();
  if (ThreadState* state = state_in(session_)) state->end_mark(begin_);
}

TraceSpan::~TraceSpan() {
  if (session_ == 0) return;
  ThreadState* state = state_in(session_);
  if (state == nullptr) return;
  const int64_t end = now();
  state->end_mark(end);
  Buffer& buffer = *state->buffer;
  buffer.append({begin_, end, flops_, function_, scope_, dtype_, buffer.thread()});
}

void trace_mark(TraceScope scope, int64_t flops, DType dtype) {
  ThreadState* state = state_in(active_session.load(std::memory_order_relaxed));
  if (state == nullptr) return;
  const int64_t time = now();
  state->end_mark(time);
  state->mark = {time, 0, flops, nullptr, scope, dtype, state->buffer->thread()};
}

TracePoint trace_here() {
  const uint64_t id = active_session.load(std::memory_order_relaxed);
  const ThreadState* state = state_in(id);
  if (state == nullptr) return {};
  return {id, now(), state->buffer->thread()};
}

void trace_wait(const TracePoint& since) {
  ThreadState* state = state_in(since.session);
  if (state == nullptr) return;
  state->buffer->append({since.time, now(), 0, nullptr, TraceScope::wait, {}, since.thread});
}

}  // namespace cpattn
