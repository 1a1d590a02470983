# SPDX-License-Identifier: Apache-2.0
"""Operators that are right raise no finding: of this library, torch and transformers."""

from __future__ import annotations

import re

import pytest

import cpattn
from cpattn.proof import conform
from cpattn.proof.conformance import SELECTION_SIGNATURES, SIGNATURES, Answer, Features, Signature
from cpattn.proof.conformance.selection.cases import edge_cases
from support.proof.conformance import SECONDS, false_alarms
from support.proof.conformance.right_operators import ATTENTION, SELECTIONS, RightOperator


def tried(operator, **options):
    return conform(operator.path, signature=operator.signature, without=operator.without, **options)


@pytest.mark.parametrize("name", ATTENTION)
def test_what_is_right_raises_no_finding(name):
    report = tried(ATTENTION[name], examples=30)
    assert report.proved, report.text()
    assert {"OWN", "COV", "LEN"} <= set(report.checked)
    features = SIGNATURES[ATTENTION[name].signature].features
    assert ("LSE" in report.checked) == (features.lse or features.sinks)
    assert ("ADDR" in report.checked) == features.far
    assert report.facts["answered"] >= report.facts["cases"] / 2  # flash has no kernels for some


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ATTENTION, *SELECTIONS])
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_found_with_other_cases(name, seed):
    report = tried((ATTENTION | SELECTIONS)[name], examples=100, seed=seed)
    assert report.proved, report.text()


def test_false_alarms_are_counted(capsys):
    assert false_alarms.main(["--cases", "60", "--seed", "3", "--only", "fast_topk"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    answered, count, verdict = lines[0], lines[-1], total
    number = re.fullmatch(r".*: cpattn fast_topk, seed 3, (\d+) answered, 0 findings", answered)
    assert number
    assert int(number[1]) >= 60
    assert re.fullmatch(rf"cpattn fast_topk, cpattn \S+: {number[1]} cases", count)
    assert verdict == f"{number[1]} cases, 0 false alarms"


def test_edges_are_counted_once(capsys):
    assert false_alarms.main(["--cases", "300", "--only", "dcp_local_indices"]) == 0
    out = capsys.readouterr().out
    rounds = [int(x) for x in re.findall(r"(\d+) answered", out)]
    edges = len(list(edge_cases(SELECTION_SIGNATURES["dcp_local_indices"].features)))
    assert len(rounds) > 1
    assert f"{sum(rounds) - edges * (len(rounds) - 1)} cases, 0 false alarms" in out


def test_a_false_alarm_is_told(capsys, monkeypatch):
    wrong = RightOperator("support.proof.conformance.broken_selections:topk_padding", "topk")
    monkeypatch.setattr(false_alarms, "SELECTIONS", {"mine": wrong})
    assert false_alarms.main(["--cases", "30", "--only", "mine"]) == 1
    out = capsys.readouterr().out
    assert "mine: a false alarm\nTOPK topk-padding: " in out
    assert out.splitlines()[-1].endswith(" cases, 1 false alarms")


def test_an_operator_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        false_alarms.main(["--only", "absent"])
    assert "--only must be in one of cpattn.paged_attention, " in capsys.readouterr().err


def attention_of_one_sequence(q, k, v, scale):
    """An operator that has a signature of its own."""
    table = [list(range(k.shape[0]))]
    return cpattn.paged_attention(
        q, k[:, None], v[:, None], q_lens=[len(q)], kv_lens=[len(k)], block_tables=table,
        scale=scale, causal=False,
    )  # fmt: skip


def one_by_one(fn, tensors):
    import torch

    outs = []
    k, v = tensors.ragged()
    q_end = k_end = 0
    for q_len, kv_len in zip(tensors.q_lens, tensors.kv_lens, strict=True):
        rows, keys = slice(q_end, q_end + q_len), slice(k_end, k_end + kv_len)
        outs.append(fn(tensors.q[rows], k[keys], v[keys], tensors.case.scale))
        q_end, k_end = rows.stop, keys.stop
    return Answer(torch.cat(outs))


ADAPTER = Signature("one by one", Features(layouts=("ragged",), causal=(False,)), one_by_one)


def test_an_adapter_of_ones_own():
    report = conform(attention_of_one_sequence, signature=ADAPTER, examples=10)
    assert report.proved, report.text()
    assert report.facts["signature"] == "one by one"


def swallows(q, k, v, *, softcap=0.0, **options):
    return cpattn.paged_attention(q, k, v, **options)


def refuses(q, k, v, *, softcap=0.0, **options):
    if softcap:
        raise NotImplementedError(f"no softcap, got {softcap}")
    return cpattn.paged_attention(q, k, v, **options)


def test_what_is_swallowed_is_a_finding_unless_it_is_not_claimed():
    assert not conform(swallows, signature="cpattn", examples=0, seconds=SECONDS).proved
    assert conform(
        swallows, signature="cpattn", examples=0, seconds=SECONDS, without=["softcap"]
    ).proved


def test_what_is_refused_is_counted_and_no_finding():
    report = conform(refuses, signature="cpattn", examples=0, seconds=SECONDS)
    assert report.proved
    assert report.facts["refused"] == {"NotImplementedError: no softcap, got #.#": 1}
    assert report.facts["answered"] == report.facts["cases"] - 1


@pytest.mark.slow
def test_the_same_seed_makes_the_same_cases():
    reports = [
        conform(swallows, signature="cpattn", examples=8, seed=5, seconds=SECONDS) for _ in range(2)
    ]
    first, second = (report.findings[0].details for report in reports)
    assert first == second
