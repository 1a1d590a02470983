# SPDX-License-Identifier: Apache-2.0
"""Captures of ranks that exchange rows over gloo."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from cpattn.proof import NotUsable, lint, read_captures
from cpattn.proof.linting.adapters.captures import from_capture
from support.distributed.distributed_worker import run_world
from support.proof import capture_worker as worker


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    sent = run_world(2, folder, worker.record_layer, folder)
    return sent, read_captures(sorted(folder.glob("*.cpcap")))


def test_a_batch_of_all_ranks_is_one(run):
    assert run[1].ranks == (0, 1)
    batches = [(batch.extend_lens, batch.seq_lens) for batch in run[1].batches]
    assert batches == [(worker.LENS["extend_lens"], worker.LENS["seq_lens"])] * 2
    fields = run[1].batches[0].call.fields
    assert (fields["cp_size"], fields["page_size"], fields["strategy"]) == (2, 4, "zigzag")
    assert fields["block_tables"].tolist() == worker.LENS["block_tables"]


@pytest.mark.parametrize("rank", [0, 1])
def test_calls_are_in_their_order_with_what_was_sent(run, rank):
    sent, captured = run
    own = [call for call in captured.calls if call.rank == rank]
    users = [call.name for call in own if call.name.startswith("ContextParallel.")]
    layer = ["ContextParallel.plan", "ContextParallel.write_kv", "ContextParallel.attend"]
    assert users == layer * 2
    posts = [call.fields for call in own if call.name == "RowExchange.post"]
    assert sum(sum(post["sends"].values()) for post in posts) == sent[rank][-1]
    assert {post["exchange"].split()[0] for post in posts} == {"write_kv"}


def test_what_one_rank_sends_the_other_receives(run):
    posts = [
        [call.fields for call in run[1].calls if call.rank == rank and "sends" in call.fields]
        for rank in range(2)
    ]
    for first, second in zip(*posts, strict=True):
        assert first["sends"] == {"1": second["receives"]["0"]}
        assert second["sends"] == {"0": first["receives"]["1"]}


def test_what_ranks_recorded_is_a_plan_that_holds(run):
    reports = [lint(document) for document in from_capture(run[1])]
    assert len(reports) == 2
    for report in reports:
        assert report.proved, report.text()
        assert {"OWN", "LEN", "SEQ"} <= set(report.checked)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", np.arange(13) + 11),  # in the pool, but not where the tables say
        ("local_q_indices", np.arange(7)),
    ],
)
def test_a_rank_that_plans_otherwise_is_refuted(run, field, value):
    calls = [
        replace(call, fields={**call.fields, field: value})
        if call.rank == 1 and call.name == "ContextParallel.plan"
        else call
        for call in run[1].calls
    ]
    document = from_capture(replace(run[1], calls=tuple(calls)))[0]
    assert {found.invariant for found in lint(document).findings} == {"OWN"}


def test_a_message_that_only_one_rank_knows_is_refuted(run):
    last = [call for call in run[1].calls if call.rank == 1 and call.name == "RowExchange.post"][-1]
    calls = tuple(call for call in run[1].calls if call is not last)
    (found, *_) = lint(from_capture(replace(run[1], calls=calls))[1]).findings
    assert found.invariant == "SEQ"
    assert "write_kv" in found.text()


def test_captures_of_some_ranks_alone_cannot_be_judged(run):
    first = replace(
        run[1], headers=run[1].headers[:1], calls=tuple(c for c in run[1].calls if not c.rank)
    )
    with pytest.raises(NotUsable, match="capture must be of 2 ranks, got 1"):
        from_capture(first)
    fewer = tuple(call for call in run[1].calls if call is not run[1].batches[0].call)
    with pytest.raises(NotUsable, match=r"as many batches, got \[1, 2\]"):
        from_capture(replace(run[1], calls=fewer))
    with pytest.raises(NotUsable, match=r"no call of ContextParallel\.plan"):
        from_capture(replace(run[1], calls=()))
