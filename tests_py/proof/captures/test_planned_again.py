# SPDX-License-Identifier: Apache-2.0
"""Recorded batches and decode steps over shared pools are judged, and planned for other ranks."""

from dataclasses import replace

import numpy as np
import pytest

from cpattn_proof import NotUsable, lint, read_captures
from cpattn_proof.captures.remade import planned_again
from cpattn_proof.linting.adapters.captures import from_capture
from support.command_line import invoke
from support.distributed.distributed_worker import run_world
from support.proof import gloo_worker

BY_PAGES, BY_TOKENS = {"placement": "page_interleave"}, {"placement": "token_interleave:2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    run_world(2, folder, gloo_worker.record_shares, folder)
    return folder


@pytest.fixture(scope="module")
def captures(folder):
    names = ("PageInterleave", "TokenInterleave")
    return [read_captures(sorted(folder.glob(f"{name}*.cpcap"))) for name in names]


def plain(capture):
    """Return the fields of plans but digests, which are not read."""
    plans = capture.of("ContextParallel.plan", "ContextParallel.plan_decode")
    return [
        (
            call.rank,
            call.name,
            {k: np.asarray(v).tolist() for k, v in call.fields.items() if k != "digests"},
        )
        for call in sorted(plans, key=lambda call: (call.rank, call.name))
    ]


@pytest.mark.parametrize("other", [BY_PAGES, BY_TOKENS, {}])
def test_ranks_that_ran_planned_the_same(captures, other):
    by_pages, by_tokens = captures
    again = planned_again(by_pages, **other)
    assert plain(again) == plain(by_tokens if other == BY_TOKENS else by_pages)
    assert plain(planned_again(by_tokens, **other)) == plain(
        by_pages if other == BY_PAGES else by_tokens
    )


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("other", [BY_PAGES, BY_TOKENS, {"placement": "replicated"}, {}])
def test_plans_of_other_ranks_hold(captures, ranks, other):
    for strategy in ("zigzag", "interleave"):
        again = planned_again(captures[0], ranks=ranks, strategy=strategy, **other)
        documents = from_capture(again)
        assert len(documents) == 1 + (other.get("placement") != "replicated")
        for document in documents:
            assert len(document["ranks"]) == ranks
            report = lint(document)
            assert report.proved, report.text()
            assert {"OWN", "LEN", "PAD"} <= set(report.checked)


def test_ranks_that_were_started_otherwise_are_refuted(captures):
    """Two ranks have different placements, so that both hold some tokens, and neither others."""
    parts = [[c for c in run.calls if c.rank == rank] for rank, run in enumerate(captures)]
    mixed = replace(captures[0], calls=(*parts[0], *parts[1]))
    for document in from_capture(mixed):
        assert {found.invariant for found in lint(document, shrink=False).findings} == {"OWN"}
    shorter = [replace(c, fields=c.fields | {"held_slots": np.zeros(1, int)}) for c in parts[1]]
    with pytest.raises(NotUsable, match=r"must be a ContextParallel.plan of 13 new tokens"):
        from_capture(replace(mixed, calls=(*parts[0], *shorter)))
    fewer = [replace(c, fields=c.fields | {"seq_lens": np.ones(1, int)}) for c in parts[0]]
    with pytest.raises(NotUsable, match="seq_lens must be 2, as extend_lens, got 1"):
        from_capture(replace(mixed, calls=(*fewer, *parts[1])))


def test_what_cannot_be_planned_is_named(captures):
    steps = tuple(call for call in captures[0].calls if call.name.endswith("decode"))
    steps = replace(captures[0], calls=steps)

    def kept_by(placement):
        calls = [replace(c, fields={**c.fields, "placement": placement}) for c in steps.calls]
        return replace(steps, calls=tuple(calls))

    for capture, other, message in [
        (steps, {"placement": "sideways"}, "placement must be .* got 'sideways'"),
        (steps, {"placement": "replicated"}, "no call of ContextParallel.plan$"),
        (kept_by("Own()"), {}, r"kept by Own\(\): another placement must be given"),
        (kept_by("TokenInterleave(shard_size=2, interleave=0)"), {}, "interleave must be"),
        (captures[0], {"strategy": "sideways"}, "a batch cannot be planned: .*strategy"),
        (captures[0], {"ranks": 0}, "a batch cannot be planned: .*shard_size must be"),
    ]:
        with pytest.raises(NotUsable, match=message):
            planned_again(capture, **other)


def run(command, folder, *arguments, status=0):
    result = invoke(command, "--capture", str(folder / "PageInterleave0.cpcap"), *arguments)
    assert result.exit_code == status, result.output
    return result.output


def test_commands_say_what_other_ranks_would_have(folder):
    output = run("lint", folder, "--ranks", "5", "--placement", "page_interleave")
    assert "batch 0, 5 ranks, keys 2.222 x the mean, pairs 1.250 x the mean: proved" in output
    assert "batch 1, 5 ranks, keys 2.222 x the mean: proved" in output
    options = ("--cp-size", "4", "--placement", "token_interleave:2", "--page-size", "4")
    output = run("plan", folder, "--decode", "recorded", *options)
    assert output.startswith("a step of 2 sequences, token_interleave:2; ")
    assert output.split("\n")[4].split()[:2] == ["4", "6"]
    output = run("plan", folder, "--decode", "0", status=2)
    assert "1 to 65536" in output
