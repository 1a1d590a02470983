# SPDX-License-Identifier: Apache-2.0
"""Captures of ranks that exchange rows over gloo are judged, and issued again on other ranks.

The last tests have records of batches that an engine shared out; they may come from anywhere.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cpattn import build_cp_metadata_all_ranks, captures
from cpattn.captures.lines import to_line
from cpattn.context_parallel.vllm_0_32 import pcp_segments
from cpattn.profiling.calls import announced
from cpattn_proof import NotUsable, lint, read_captures, simulate_capture
from cpattn_proof.captures import Capture
from cpattn_proof.captures.reader import RecordedCall
from cpattn_proof.linting.adapters.captures import from_capture
from support.command_line import invoke
from support.distributed.distributed_worker import run_world
from support.proof import gloo_worker
from support.proof.plans import segments_of_vllm


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    sent = run_world(2, folder, gloo_worker.record_layer, folder)
    files = sorted(folder.glob("*.cpcap"))
    return [of_rank[-1] for of_rank in sent], files, read_captures(files)


@pytest.fixture
def capture(recorded):
    return recorded[2]


def sent_by_rank(report):
    return report.facts["sent_bytes_by_rank"]["send"]


def test_what_was_sent_is_sent_again(recorded):
    sent, _, capture = recorded
    report = simulate_capture(capture)
    assert report.proved, report.text()
    assert report.subject == "2 recorded batches on 2 ranks, as recorded"
    assert sent_by_rank(report) == sent
    assert all(lint(document).proved for document in from_capture(capture))
    assert report.facts["calls_by_rank"]["ContextParallel.plan"] == [2, 2]
    assert all(predicted > 0 for predicted in report.facts["predicted_seconds_by_rank"])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "strategy"), [(4, "zigzag"), (3, "interleave")])
def test_other_ranks_send_what_they_would_have_sent(capture, size, strategy, tmp_path):
    """A real run on that number of ranks sends the same bytes."""
    sent = run_world(size, tmp_path, gloo_worker.record_layer, tmp_path, strategy)
    report = simulate_capture(capture, ranks=size, strategy=strategy)
    assert report.proved, report.text()
    assert report.subject == f"2 recorded batches on {size} ranks, planned again by {strategy}"
    assert sent_by_rank(report) == [of_rank[-1] for of_rank in sent]


def plans_on_rank_1(call):
    return call.rank == 1 and call.name == "ContextParallel.plan"


def changed(capture, chosen, **fields):
    calls = tuple(
        replace(call, fields={**call.fields, **fields}) if chosen(call) else call
        for call in capture.calls
    )
    return replace(capture, calls=calls)


def test_a_rank_that_planned_otherwise_is_named(capture):
    other = changed(capture, plans_on_rank_1, extend_lens=np.array([9, 5]))
    (finding,) = simulate_capture(other).findings
    assert (finding.invariant, finding.kind) == ("SEQ", "other-extend_lens")
    assert "[9, 4] on rank 0, [9, 5] on rank 1" in finding.what
    line = next(c.line for c in capture.of("ContextParallel.plan") if c.rank == 1)
    assert f"run1.cpcap:{line} in plan" in finding.picture


def test_messages_that_do_not_meet_are_named_by_the_lines_of_the_files(capture):
    posts = capture.of("RowExchange.post")
    post = next(c for c in posts if c.fields["exchange"] == "write_kv")
    other = changed(capture, lambda call: call is post, sends={"1": 100})
    (finding,) = simulate_capture(other).findings
    assert finding.kind == "other-size"
    assert f"run0.cpcap:{post.line} in write_kv" in finding.picture
    last = [call for call in posts if call.rank == 1][-1]  # left out, so rank 0 waits for it
    other = replace(capture, calls=tuple(call for call in capture.calls if call is not last))
    (finding,) = simulate_capture(other).findings
    assert (finding.kind, finding.ranks) == ("rank-returned", (0,))
    (finding, *_) = lint(from_capture(other)[1]).findings
    assert finding.invariant == "SEQ"
    assert "write_kv" in finding.text()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", np.arange(13) + 11),  # they lie in the pool, but not where tables say
        ("local_q_indices", np.arange(7)),
    ],
)
def test_a_rank_that_plans_otherwise_is_refuted(capture, field, value):
    document = from_capture(changed(capture, plans_on_rank_1, **{field: value}))[0]
    assert {found.invariant for found in lint(document).findings} == {"OWN"}


def test_captures_of_some_ranks_alone_cannot_be_judged(capture):
    first = replace(
        capture, headers=capture.headers[:1], calls=tuple(c for c in capture.calls if not c.rank)
    )
    with pytest.raises(NotUsable, match="capture must be of 2 ranks, got 1"):
        from_capture(first)
    fewer = tuple(call for call in capture.calls if call is not capture.batches[0].call)
    with pytest.raises(NotUsable, match=r"as many batches, got \[1, 2\]"):
        from_capture(replace(capture, calls=fewer))
    with pytest.raises(NotUsable, match=r"no call of ContextParallel\.plan"):
        from_capture(replace(capture, calls=()))


def made_up(size=2, tokens=64, width=1_000_000, **other):
    """Capture one sequence: each rank sends its rows to the others, then attends for 1 s."""
    plans = build_cp_metadata_all_ranks([tokens], [tokens], cp_size=size)
    rows = [len(plan.local_q_indices) for plan in plans]
    lens = np.array([tokens])
    calls = []
    for rank in range(size):
        others = [str(peer) for peer in range(size) if peer != rank]
        plan = {
            "extend_lens": lens, "seq_lens": lens, "page_size": 4, "strategy": "zigzag",
            "cp_size": size, "cp_rank": rank, "placement": None, "block_tables": lens,
            "slots": lens, "rows_per_rank": rows, "weights": None, "cut_pages": None,
            "held_slots": None, "held_keys": None, **other,
        }  # fmt: skip
        sends = dict.fromkeys(others, rows[rank] * width)
        receives = {peer: rows[int(peer)] * width for peer in others}
        post = {"cp_rank": rank, "exchange": "write_kv", "sends": sends, "receives": receives}
        calls += [
            RecordedCall("ContextParallel.plan", rank, 0.0, 0.25, plan),
            RecordedCall("build_cp_metadata", rank, 0.1, 0.1, {}),  # the plan above made it
            RecordedCall("ContextParallel.write_kv", rank, 0.5, 0.5, {}),
            RecordedCall("RowExchange.post", rank, 0.6, 0.1, post),
            RecordedCall("ContextParallel.attend", rank, 1.0, 1.0, {}),
        ]
    return Capture(tuple({"rank": rank, "cpattn": "0"} for rank in range(size)), tuple(calls))


def test_predicted_times_are_those_that_a_person_counts():
    """Planning takes 0.25 s, each of two messages 1 s and 1 s for its bytes, attention 1 s."""
    facts = simulate_capture(made_up(), latency_us=1e6, gbps=32 * 1e6 * 8 / 1e9).facts
    assert facts["predicted_seconds_by_rank"] == pytest.approx([0.25 + 2 * 2 + 1] * 2)
    assert facts["recorded_seconds_by_rank"] == [2.0, 2.0]
    assert facts["sent_bytes_by_rank"]["send"] == [32_000_000, 32_000_000]


def test_attention_takes_its_time_per_pair():
    """64 tokens have 2,080 pairs: each of 2 ranks takes 1 s for 1,040, each of 4 has 520."""
    fast = {"latency_us": 0, "gbps": 1e6}
    facts = simulate_capture(made_up(width=1), ranks=4, **fast).facts
    assert facts["predicted_seconds_by_rank"] == pytest.approx([0.25 + 0.5] * 4)
    contiguous = simulate_capture(made_up(width=1), strategy="contiguous", **fast).facts
    first, last = 32 * 33 / 2 / 1040, (2080 - 32 * 33 / 2) / 1040
    assert contiguous["predicted_seconds_by_rank"] == pytest.approx([0.25 + first, 0.25 + last])


def of_one_rank(capture):
    calls = tuple(call for call in capture.calls if call.rank == 0)
    return replace(capture, headers=capture.headers[:1], calls=calls)


def is_post(call):
    return call.name == "RowExchange.post"


def decoded():
    lens = dict.fromkeys(("extend_lens", "seq_lens", "block_tables", "slots"), np.array([3]))
    fields = {**lens, "page_size": 4, "placement": "pages", "cp_size": 1, "cp_rank": 0}
    call = RecordedCall("ContextParallel.plan_decode", 0, 0.0, 0.1, fields)
    return Capture(({"rank": 0},), (call,))


TO_NOBODY = changed(made_up(), is_post, sends={"4000": 1})
OTHER_LENS = changed(made_up(), lambda call: True, seq_lens=np.array([3]))
UNEQUAL = changed(made_up(3), lambda c: c.rank == 0 and is_post(c), sends={"1": 7, "2": 9})
ONE_RANK_TWICE = changed(made_up(), lambda call: call.rank == 1, cp_rank=0)


@pytest.mark.parametrize(
    ("capture", "ranks", "message"),
    [
        (TO_NOBODY, None, "at most 64 ranks can be simulated, got 4001"),
        (OTHER_LENS, 3, "a batch cannot be planned again: .*seq_lens"),
        (of_one_rank(made_up()), None, "of all 2 ranks, there is none of rank 1"),
        (Capture(({"rank": 0},), ()), None, "no rank planned or sent anything"),
        (decoded(), 2, r"plan_decode .* cannot be planned again"),
        (made_up(placement="pages"), 4, "keys are kept by pages .* plan --placement"),
        (made_up(weights=[1.0, 3.0]), 4, "weights or whole pages cut the batch"),
        (made_up(rows_per_rank=[40, 40]), 4, r"\[40, 40\] are not those of its lengths"),
        (made_up(1), 4, "one rank sends nothing"),
        (UNEQUAL, 4, "what is sent is not a rank's own rows to all others"),
        (ONE_RANK_TWICE, None, "captures must be of one group, each of another rank"),
    ],
)
def test_what_cannot_be_issued_says_why(capture, ranks, message):
    with pytest.raises(NotUsable, match=f"simulate_capture: .*{message}"):
        simulate_capture(capture, **({"ranks": ranks} if ranks else {}))


def test_options_are_checked():
    for options in ({"ranks": 65}, {"gbps": 0}, {"strategy": "spiral"}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            simulate_capture(made_up(), **options)
    with pytest.raises(TypeError, match="capture must be a Capture, got str"):
        simulate_capture("run.cpcap")


def run(*arguments):
    return invoke("simulate", *map(str, arguments))


def test_the_command_issues_captures(recorded, tmp_path):
    files = [word for file in recorded[1] for word in ("--capture", file)]
    result = run(*files, "--trace", tmp_path / "trace.json", "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "2 recorded batches on 2 ranks, as recorded: proved" in result.output
    assert f"send                           5 calls {max(recorded[0]):>14,} bytes" in result.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any("cpcap:" in event.get("args", {}).get("place", "") for event in events)
    assert "2 recorded batches" in (tmp_path / "page.html").read_text()
    report = json.loads(run(*files, "--ranks", 16, "--json").output)
    assert len(report["facts"]["predicted_seconds_by_rank"]) == 16


LENS = [[40, 1, 5], [16, 24, 0]]


@announced("PCPManager._build_batch_layout")
def lay_out(manager, num_scheduled_tokens, num_computed_tokens):
    """Return segments of all ranks, as objects like vLLM's, and the tokens of each rank."""
    ranks = pcp_segments(num_scheduled_tokens, num_computed_tokens, pcp_size=manager.pcp_world_size)
    return segments_of_vllm(ranks), [int(rank.rank_stop[-1]) for rank in ranks]


def record(folder, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    with captures.capture(folder / f"{rank}.cpcap") as path:
        lay_out(SimpleNamespace(pcp_rank=rank, pcp_world_size=2), *LENS)
    return path


def test_ranks_that_agree_are_proved(tmp_path, monkeypatch):
    paths = [record(tmp_path, monkeypatch, rank) for rank in range(2)]
    (document,) = from_capture(read_captures(paths))
    assert lint(document).proved
    document["ranks"][1]["segments"]["keys"][-1] -= 1
    assert "COV" in {found.invariant for found in lint(document, shrink=False).findings}
    both = read_captures(paths)
    with pytest.raises(NotUsable, match=r"ranks must have laid out as many, got \[2, 1\]"):
        from_capture(replace(both, calls=(both.calls[0], *both.calls)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cp_rank": 2}, "1.cpcap, line 2: must be of one rank of 2, got rank 2 of 2"),
        ({"cp_size": 3}, "1.cpcap, line 2: must be of one rank of 2, got rank 1 of 3"),
        ({"cp_rank": 0}, "capture must have as many of each rank, got [2, 0]"),
        ({"prefix_lens": np.array([16, 24])}, "lengths must be those of rank 0 in this batch"),
        ({"extend_lens": np.array([40, 2, 5])}, "lengths must be those of rank 0 in this batch"),
        ({"segments": np.zeros((1, 5), int)}, "segments must have 6 columns, of 3 requests"),
        ({"segments": np.full((1, 6), 3)}, "segments must have 6 columns, of 3 requests"),
        ({"segments": np.full((1, 6), -1)}, "segments must be an array of 2 dimensions"),
    ],
)
def test_a_file_that_does_not_fit_is_named(change, message, tmp_path, monkeypatch):
    paths = [record(tmp_path, monkeypatch, rank) for rank in range(2)]
    (call,) = read_captures(paths[1:]).calls
    times = {"call": call.name, "at": call.at, "seconds": call.seconds}
    header, _ = paths[1].read_bytes().splitlines(keepends=True)
    paths[1].write_bytes(header + to_line({**times, **call.fields, **change}))
    with pytest.raises(NotUsable) as refused:
        from_capture(read_captures(paths))
    assert message in str(refused.value)
