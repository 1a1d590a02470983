# SPDX-License-Identifier: Apache-2.0
"""Profiles record calls, sum them up, and write them to files."""

import json
import sys
import threading

import numpy as np
import pytest

import cpattn
from cpattn import _core
from cpattn.profiling import TraceScope
from cpattn.profiling.timeline import _share_of_steps
from cpattn.sparse import sglang_0_5_23
from support.cases import Case, make_inputs

# head_dim 48 fills no AMX tile, and v_head_dim differs.
CASE = Case((70, 3), (700, 67), head_dim=48, v_head_dim=32, dtype="bfloat16")


def visible_scores(case: Case) -> int:
    pairs = (
        kv_len - q_len + i + 1
        for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True)
        for i in range(q_len)
    )
    return sum(pairs) * case.num_heads


def profiled(case: Case = CASE, calls: int = 1, **options) -> cpattn.Profile:
    inputs = make_inputs(case)
    with cpattn.profile(**options) as trace:
        for _ in range(calls):
            cpattn.paged_attention(**inputs)
    return trace


def made_up(events: list[tuple[int, int, TraceScope]], threads: int = 1) -> cpattn.Profile:
    with cpattn.profile() as trace:
        pass
    rows = np.zeros(len(events), trace.events.dtype)
    for name, values in zip(("begin", "end", "scope"), zip(*events, strict=True), strict=True):
        rows[name] = values
    rows["thread"] = np.arange(len(events)) % threads
    trace.events = rows
    trace.threads = [cpattn.profiling.Thread(f"thread {i}", 100 + i, 0) for i in range(threads)]
    return trace


def test_flops_are_those_of_the_visible_scores(isa):
    trace = profiled()
    row = {row.scope: row for row in trace.summary()}
    scores = visible_scores(CASE)
    assert row["total"].flops == 2 * scores * (CASE.head_dim + CASE.v_head_dim)
    # Whole granules of keys are multiplied, so a little more than the visible keys.
    assert 2 * scores * CASE.head_dim <= row["qk"].flops <= 3 * scores * CASE.head_dim
    assert row["pv"].flops * CASE.head_dim == row["qk"].flops * CASE.v_head_dim
    assert {_core.dtype_name(dtype) for dtype in trace.peaks} == {"bfloat16"}
    assert row["qk"].peak > 0
    assert trace.functions == ["", "paged_attention"]


def test_events_lie_within_their_items_and_calls():
    trace = profiled(CASE.with_(q_lens=(300, 40)), calls=2)
    items, calls = trace.select(TraceScope.item), trace.select(TraceScope.call)
    assert len(calls) == trace.calls == 2
    for thread in range(len(trace.threads)):
        mine = items[items["thread"] == thread]
        for scope in (TraceScope.pack, TraceScope.qk, TraceScope.softmax, TraceScope.pv):
            events = trace.select(scope, thread)
            item = mine[np.searchsorted(mine["begin"], events["begin"], side="right") - 1]
            assert (item["begin"] <= events["begin"]).all()
            assert (events["end"] <= item["end"]).all()
    call = calls[np.searchsorted(calls["begin"], items["begin"], side="right") - 1]
    assert (call["begin"] <= items["begin"]).all()
    assert (items["end"] <= call["end"]).all()
    assert trace.events["end"].max() <= trace.seconds * 1e9


def test_plans_merges_and_gathers_are_recorded():
    """The results are those that calls without a profile have."""
    out, lse = np.ones((4, 2, 16), np.float32), np.zeros((4, 2), np.float32)
    ranks = cpattn.build_cp_metadata_all_ranks([8], cp_size=2)
    inputs = make_inputs(CASE)
    expected = cpattn.paged_attention(**inputs)
    with cpattn.profile() as trace:
        cpattn.merge_state(out, lse, out.copy(), lse.copy())
        ranks[0].unshard([rank.shard(np.arange(8)) for rank in ranks])
        out = cpattn.paged_attention(**inputs)
    assert (out == expected).all()
    for scope in (TraceScope.merge, TraceScope.gather, TraceScope.plan):
        assert len(trace.select(scope)) == 1, scope.name


def deep(calls: int) -> int:
    return len(np.sort(np.arange(50.0)[::-1])) if calls == 0 else deep(calls - 1)


def test_functions_have_their_names_when_the_calls_are_long_gone():
    score, keys = np.ones((2, 8), np.float32), np.ones((6, 16), np.float32)
    q, weights = np.ones((2, 1, 16), np.float32), np.ones((2, 1), np.float32)
    inputs = make_inputs(CASE)
    with cpattn.profile() as trace:
        cpattn.paged_attention(**inputs)
        cpattn.sparse.indexer_logits(q, keys, weights, [0, 3], [6, 5])
        cpattn.sparse.indexer_topk(q, keys, weights, [0, 3], [6, 5], topk=2)
        sglang_0_5_23.fast_topk(score, [8, 4], 3)
        sglang_0_5_23.fast_topk_transform_ragged_fused(score, [8, 4], [0, 9], 3)
        deep(50)
    assert set(trace.functions[1:]) == {
        "paged_attention", "indexer_logits", "indexer_topk", "fast_topk",
        "fast_topk_transform_ragged_fused",
    }  # fmt: skip


def test_one_profile_at_a_time():
    with cpattn.profile() as outer:
        with pytest.raises(RuntimeError, match="another profile of this process is running"):
            cpattn.profile().__enter__()
        for use in (lambda: outer.events, outer.table):
            with pytest.raises(AttributeError, match="is there when the with block has ended"):
                use()
        assert "has not ended" in repr(outer)
    assert outer.calls == 0
    with pytest.raises(KeyError), cpattn.profile() as trace:
        raise KeyError
    assert len(trace.events) == 0
    trace = profiled(max_events=cpattn.profiling.MAX_EVENTS)
    assert (trace.calls, trace.dropped) == (1, 0)


def test_no_memory_for_events_is_an_error(monkeypatch):
    monkeypatch.setattr(cpattn.profiling.recording, "_RECORD", np.dtype((np.void, 2**30)))
    with pytest.raises(MemoryError, match="profile: no memory for max_events = 1048576"):
        cpattn.profile().__enter__()
    monkeypatch.undo()
    assert profiled().calls == 1  # no profile is running any more
    with pytest.raises(ValueError, match="max_events must be <= 67108864, got 1099511627776"):
        cpattn.profile(max_events=2**40)


def test_a_selection_that_would_be_empty_by_mistake_is_refused():
    trace = profiled()
    with pytest.raises(TypeError, match="select: scope must be a TraceScope, got str"):
        trace.select("qk")
    with pytest.raises(ValueError, match=r"select: thread must be <= \d+, got 99"):
        trace.select(TraceScope.qk, 99)
    with pytest.raises(ValueError, match="select: thread must be >= 0, got -1"):
        trace.select(TraceScope.qk, -1)
    with pytest.raises(ValueError, match="timeline: begin and end must be finite, got -inf and"):
        trace.timeline(begin=-np.inf)


def test_calls_of_all_threads_are_in_it():
    inputs = make_inputs(CASE)
    with cpattn.profile() as trace:
        threads = [
            threading.Thread(target=cpattn.paged_attention, kwargs=inputs | {"num_threads": 1})
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert trace.calls == 3
    assert len(np.unique(trace.select(TraceScope.call)["thread"])) == 3


def test_what_does_not_fit_is_counted_and_said():
    trace = profiled(max_events=5)
    assert len(trace.events) <= 5 * len(trace.threads)
    assert trace.dropped > 0
    note = f"{trace.dropped} more dropped: raise max_events"
    assert note in repr(trace)
    assert note in trace._repr_html_()
    assert note in trace.table().title


def test_the_summary_adds_up():
    # One thread has a call of 10 with 7 in scopes, then idles for 90; another waits for 4.
    trace = made_up([(0, 10, TraceScope.call), (2, 6, TraceScope.wait), (1, 8, TraceScope.qk)], 2)
    rows = {row.scope: row for row in trace.summary()}
    assert list(rows) == ["qk", "wait", "other", "total"]
    assert rows["total"].seconds == pytest.approx(14e-9)
    assert rows["other"].seconds == pytest.approx(3e-9)
    assert rows["qk"].share == pytest.approx(0.5)
    assert rows["qk"].peak is None  # rows without flops have no peak
    assert sum(row.share for row in trace.summary()[:-1]) == pytest.approx(1)


def test_an_empty_profile_can_be_shown(tmp_path):
    with cpattn.profile() as trace:
        pass
    assert [row.scope for row in trace.summary()] == ["wait", "other", "total"]
    assert "0 calls" in repr(trace)
    assert "<table>" in trace._repr_html_()
    trace.plot(tmp_path / "empty.png")
    trace.save(tmp_path / "empty.json")
    assert len(json.loads((tmp_path / "empty.json").read_text())["traceEvents"]) == 1


def test_table_and_html_have_a_row_for_each_scope():
    from rich.console import Console

    trace = profiled()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(trace.table())
    for row in trace.summary():
        assert row.scope in capture.get()
        assert f"<td>{row.scope}</td>" in trace._repr_html_()
    assert "1 × paged_attention" in capture.get()


def test_steps_of_the_timeline_show_how_much_of_them_is_covered(tmp_path):
    events = made_up([(0, 10, TraceScope.qk), (25, 30, TraceScope.qk)]).events
    share = _share_of_steps(events, np.array([0, 5, 20, 30, 40]) / 1e9)
    assert share == pytest.approx([1, 1 / 3, 1 / 2, 0])
    scopes = (TraceScope.qk, TraceScope.softmax, TraceScope.pv)
    trace = made_up([(i * 10, i * 10 + 9, scopes[i % 3]) for i in range(20_000)], threads=4)
    figure = trace.timeline()
    (axes,) = figure.axes
    assert len(axes.collections) == 4 * len(scopes)  # lanes times scopes, for any number of events
    assert "[ms]" in axes.get_xlabel()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["qk", "softmax", "pv"]
    assert len(axes.get_yticklabels()) == 4
    trace.plot(tmp_path / "part.png", begin=0.00001, end=0.00002)
    assert (tmp_path / "part.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"begin must be before end, got 2 and 1"):
        trace.timeline(2, 1)


def test_the_saved_trace_has_what_perfetto_needs(tmp_path):
    trace = profiled(calls=2)
    trace.save(tmp_path / "trace.json")
    saved = json.loads((tmp_path / "trace.json").read_text())
    names = {
        event["tid"]: event["args"]["name"]
        for event in saved["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert names == {thread.id: thread.name for thread in trace.threads}
    events = [event for event in saved["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(trace.events)
    for event in events:
        assert set(event) == {"ph", "pid", "tid", "ts", "dur", "cat", "name", "args"}
        assert event["tid"] in names
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    calls = [event for event in events if event["cat"] == "call"]
    assert [event["name"] for event in calls] == ["paged_attention"] * 2
    assert {event["args"]["dtype"] for event in events if event["name"] == "qk"} == {"bfloat16"}


@pytest.mark.parametrize("module", ["matplotlib", "rich.table"])
def test_what_is_not_installed_is_named_with_its_cure(monkeypatch, module):
    trace = profiled()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cpattn\[profile\]'"):
        _ = trace.table() if module.startswith("rich") else trace.timeline()
