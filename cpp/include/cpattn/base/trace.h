// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpattn/base/dtype.h"

namespace cpattn {

/// The activity of a thread. The scopes up to `wait` exclude each other on a thread, with one
/// exception: a call may wait for a worker that a concurrent call is using. The scopes `item`, a
/// unit of work, and `call`, a public function, enclose the others.
enum class TraceScope : uint8_t {
  pack,     // bringing Q, K and V into the order that the products read
  qk,       // Q K^T
  softmax,  // softcap, masks, softmax; with AMX, where it runs beside Q K^T, part of qk
  pv,       // P V
  write,    // normalising rows and writing them out
  merge,    // partial results of one row
  gather,   // rows of several ranks
  plan,     // dividing a batch into items
  wait,     // a thread of a call without work: it starts late, or others end later
  item,
  call,
};

struct TraceEvent {
  int64_t begin = 0;  // nanoseconds since start_trace()
  int64_t end = 0;
  int64_t flops = 0;  // qk and pv count all that were computed, item the useful ones
  TraceScope scope = TraceScope::call;
  DType dtype = DType::float32;  // in which the flops were computed
  uint16_t thread = 0;           // into Trace::threads
  uint16_t function = 0;         // into Trace::functions
};

struct TraceThread {
  std::string name;
  int64_t id = 0;       // the operating system's
  int64_t dropped = 0;  // events that found the buffer full
};

/// The record of the time from start_trace() to stop_trace().
struct Trace {
  int64_t nanoseconds = 0;
  std::vector<TraceEvent> events;             // grouped by the thread that recorded them
  std::vector<TraceThread> threads;           // in the order of their first events
  std::vector<std::string> functions = {""};  // names of calls
};

/// Starts to record at most max_events (>= 1) events of each thread, of 40 bytes each; further
/// events are counted as dropped. A thread keeps its buffer until it records for another trace or
/// ends. A process has one trace at a time: throws std::runtime_error while another is on. A forked
/// child records nothing.
void start_trace(int64_t max_events);

/// Ends the trace. Scopes that have not ended are left out. Throws std::runtime_error when no trace
/// is on.
Trace stop_trace();

/// Whether a trace is on. It costs one relaxed load.
bool tracing();

/// Records its own lifetime. It costs one relaxed load when no trace is on.
class TraceSpan {
 public:
  /// `function` is copied if a trace is on.
  explicit TraceSpan(
      TraceScope scope,
      int64_t flops = 0,
      DType dtype = DType::float32,
      const char* function = nullptr
  );
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  uint64_t session_;
  int64_t begin_ = 0;
  int64_t flops_;
  TraceScope scope_;
  DType dtype_;
  const char* function_;
};

/// Moves this thread to `scope`, until its next mark or until one of its TraceSpans begins or ends.
void trace_mark(TraceScope scope, int64_t flops, DType dtype);

/// A thread and a point in time.
struct TracePoint {
  uint64_t session = 0;  // 0 when no trace is on
  int64_t time = 0;
  uint16_t thread = 0;
};
/// The calling thread, now.
TracePoint trace_here();

/// Records that the thread of `since` has waited from then until now. Any
/// thread may call it.
void trace_wait(const TracePoint& since);

}  // namespace cpattn
