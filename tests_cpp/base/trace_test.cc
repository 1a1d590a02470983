// SPDX-License-Identifier: Apache-2.0
#include "cpattn/base/trace.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpattn/base/parallel.h"

namespace cpattn {
namespace {

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

std::vector<TraceEvent> events_of(const Trace& trace, TraceScope scope) {
  std::vector<TraceEvent> events;
  for (const TraceEvent& event : trace.events) {
    if (event.scope == scope) events.push_back(event);
  }
  return events;
}

TEST(Trace, RecordsNothingUnlessStarted) {
  {
    const TraceSpan span(TraceScope::plan);
  }
  trace_mark(TraceScope::qk, 1, DType::float32);
  EXPECT_EQ(trace_here().session, 0U);
  EXPECT_FALSE(tracing());
  start_trace(10);
  EXPECT_TRUE(tracing());
  EXPECT_TRUE(stop_trace().events.empty());
}

TEST(Trace, KeepsNamesThatDoNotLive) {
  start_trace(10);
  for (const std::string& name :
       {std::string("first"), std::string("second"), std::string("first")}) {
    std::string gone = name;
    {
      const TraceSpan span(TraceScope::call, 0, DType::float32, gone.c_str());
    }
    gone.assign(gone.size(), '?');
  }
  const Trace trace = stop_trace();
  EXPECT_EQ(trace.functions, (std::vector<std::string>{"", "first", "second"}));
  ASSERT_EQ(trace.events.size(), 3U);
  EXPECT_EQ(trace.events[2].function, trace.events[0].function);
}

TEST(Trace, OneAtATime) {
  EXPECT_THROW(stop_trace(), std::runtime_error);
  EXPECT_THROW(start_trace(0), std::invalid_argument);
  start_trace(1);
  EXPECT_THROW(start_trace(1), std::runtime_error);
  stop_trace();
}

TEST(Trace, MarksDivideTheSpanAroundThem) {
  start_trace(10);
  {
    const TraceSpan span(TraceScope::item, 7, DType::bfloat16, "test");
    trace_mark(TraceScope::qk, 3, DType::bfloat16);
    sleep_ms(2);
    trace_mark(TraceScope::pv, 4, DType::bfloat16);
  }
  const Trace trace = stop_trace();
  ASSERT_EQ(trace.events.size(), 3U);
  const TraceEvent& qk = trace.events[0];
  const TraceEvent& pv = trace.events[1];
  const TraceEvent& item = trace.events[2];
  EXPECT_EQ(qk.scope, TraceScope::qk);
  EXPECT_EQ(pv.scope, TraceScope::pv);
  EXPECT_EQ(item.scope, TraceScope::item);
  EXPECT_EQ(trace.functions.at(item.function), "test");
  EXPECT_EQ(trace.functions.at(qk.function), "");
  EXPECT_EQ(qk.flops, 3);
  EXPECT_EQ(pv.dtype, DType::bfloat16);
  EXPECT_LE(item.begin, qk.begin);
  EXPECT_GE(qk.end - qk.begin, 2'000'000);
  EXPECT_EQ(qk.end, pv.begin);
  EXPECT_EQ(pv.end, item.end);
  EXPECT_LE(item.end, trace.nanoseconds);
}

TEST(Trace, ASpanEndsTheMarkBeforeIt) {
  start_trace(10);
  {
    const TraceSpan item(TraceScope::item);
    trace_mark(TraceScope::write, 0, DType::float32);
    const TraceSpan merge(TraceScope::merge);
  }
  const Trace trace = stop_trace();
  ASSERT_EQ(trace.events.size(), 3U);
  EXPECT_EQ(trace.events[0].scope, TraceScope::write);
  EXPECT_EQ(trace.events[1].scope, TraceScope::merge);
  EXPECT_EQ(trace.events[0].end, trace.events[1].begin);
}

TEST(Trace, CountsWhatItDrops) {
  start_trace(2);
  for (int i = 0; i < 5; ++i) const TraceSpan span(TraceScope::merge);
  const Trace trace = stop_trace();
  EXPECT_EQ(trace.events.size(), 2U);
  EXPECT_EQ(trace.threads.at(0).dropped, 3);
}

TEST(Trace, ShowsThreadsThatWaitForTheLastItem) {
  start_trace(100);
  std::atomic<int> begun{0};
  parallel_for(2, 2, [&](int64_t, StopToken&) {
    const TraceSpan span(TraceScope::item);
    const bool first = begun++ == 0;
    while (begun < 2) sleep_ms(1);  // one item for each thread
    sleep_ms(first ? 50 : 1);
  });
  const Trace trace = stop_trace();
  ASSERT_EQ(trace.threads.size(), 2U);
  EXPECT_NE(trace.threads[0].id, trace.threads[1].id);
  const std::vector<TraceEvent> items = events_of(trace, TraceScope::item);
  ASSERT_EQ(items.size(), 2U);
  const bool first_is_brief = items[0].end < items[1].end;
  const TraceEvent& brief = items[first_is_brief ? 0 : 1];
  const TraceEvent& last = items[first_is_brief ? 1 : 0];
  int64_t longest = 0;
  for (const TraceEvent& wait : events_of(trace, TraceScope::wait)) {
    EXPECT_LE(wait.begin, wait.end);
    if (wait.thread == brief.thread && wait.begin >= brief.end) {
      longest = std::max(longest, wait.end - wait.begin);
    }
  }
  EXPECT_GE(longest, (last.end - brief.end) / 2);  // a busy machine may delay its begin
}

TEST(Trace, EndsWhileThreadsAreRecording) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) {
      const TraceSpan span(TraceScope::item);
      trace_mark(TraceScope::qk, 1, DType::float32);
    }
  });
  for (int i = 0; i < 20; ++i) {
    start_trace(1000);
    sleep_ms(1);
    for (const TraceEvent& event : stop_trace().events) EXPECT_LE(event.begin, event.end);
  }
  stop = true;
  other.join();
}

#if !defined(__SANITIZE_THREAD__)
TEST(Trace, AForkedChildRecordsNothing) {
  start_trace(10);
  {
    const TraceSpan span(TraceScope::merge);
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (tracing()) _exit(1);
    start_trace(10);
    {
      const TraceSpan span(TraceScope::plan);
    }
    _exit(stop_trace().events.size() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  stop_trace();
}
#endif

}  // namespace
}  // namespace cpattn
