# SPDX-License-Identifier: Apache-2.0
"""Operators that select keys: right ones raise nothing, and each fault is named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from cpattn.proof import NotUsable, conform
from cpattn.proof.conformance import SELECTION_FAULTS, SELECTION_SIGNATURES, SelectionSignature
from cpattn.proof.conformance.selection.cases import (
    SelectionCase,
    candidates_of,
    cases,
    edge_cases,
    make_scores,
)
from cpattn.proof.conformance.selection.trials import is_topk
from cpattn.sparse import fast_topk
from support.proof.conformance import SECONDS
from support.proof.conformance import broken_selections as broken
from support.proof.conformance.right_operators import SELECTIONS

OPERATORS = {name: getattr(broken, name.replace("-", "_")) for name in SELECTION_FAULTS
             if name != "topk-16-bit-scores"}  # fmt: skip
OPERATORS["topk-16-bit-scores"] = broken.topk_16_bit_scores


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_right_raises_no_finding(name):
    path, signature, _, without = SELECTIONS[name]
    report = conform(path, signature=signature, examples=40, without=without)
    assert report.proved, report.text()
    assert report.checked == ("OWN", "LEN", "TOPK", "PAD")
    assert report.facts["refused"] == {}
    assert report.facts["answered"] >= 40


@pytest.mark.parametrize("name", SELECTION_FAULTS)
def test_a_fault_is_named(name):
    report = conform(OPERATORS[name], signature="topk", examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == [name], report.text()
    (finding,) = report.findings
    assert finding.invariant == "TOPK"
    assert finding.where
    assert "row " in finding.picture
    assert report.exit_code == 1
    report.to_json()


@pytest.mark.parametrize(
    ("operator", "kind", "invariant"),
    [
        (broken.crash, "crash", "ADDR"),
        (broken.raises, "raises", "LEN"),
        (broken.wrong_form, "wrong-form", "ADDR"),
    ],
)
def test_what_gives_no_answer_is_named(operator, kind, invariant):
    report = conform(operator, signature="topk", examples=0, seconds=SECONDS)
    assert [(found.kind, found.invariant) for found in report.findings] == [(kind, invariant)]


def test_what_answers_nothing_cannot_be_judged():
    with pytest.raises(NotUsable, match=r"none of .* wrong-form, indices must be integers"):
        conform(broken.no_integers, signature="topk", examples=0, seconds=SECONDS)


@pytest.mark.parametrize(
    ("operator", "signature", "kind"),
    [
        (broken.indexer_without_starts, "indexer_topk", "topk-local-ids"),
        (broken.global_ids, "dcp_local_indices", "topk-local-ids"),
    ],
)
def test_local_and_global_ids_are_told_apart(operator, signature, kind):
    report = conform(operator, signature=signature, examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == [kind], report.text()


def test_the_union_of_ranks_must_be_the_top_k():
    report = conform(
        broken.other_interleave, signature="dcp_local_indices", examples=0, seconds=SECONDS
    )
    assert not report.proved
    assert {finding.invariant for finding in report.findings} == {"TOPK"}


def test_the_bucket_is_found_to_a_key():
    """The smallest case has one candidate more than the bucket has slots."""
    report = conform(broken.topk_bucket_overflow, signature="topk", examples=0, seconds=30)
    (finding,) = report.findings
    assert finding.details["case"]["lengths"] == (broken.BUCKET_SLOTS + 1,)
    assert "missing:" in finding.picture


def test_two_faults_have_two_names():
    def operator(scores, lengths, topk, row_starts=None):
        chosen = broken.topk_padding(scores, lengths, topk, row_starts)
        crowded = int(lengths.max()) > broken.BUCKET_SLOTS
        return broken.topk_bucket_overflow(scores, lengths, topk) if crowded else chosen

    report = conform(operator, signature="topk", examples=0, seconds=SECONDS)
    kinds = {finding.kind for finding in report.findings}
    assert kinds == {"topk-padding", "topk-bucket-overflow"}


def test_what_is_not_claimed_is_not_tried():
    assert conform(
        broken.topk_local_ids, signature="topk", examples=0, seconds=SECONDS, without=["starts"]
    ).proved
    with pytest.raises(ValueError, match="without must be of starts, empty, high, got 'ranks'"):
        conform(broken.topk_local_ids, signature="topk", without=["ranks"])


def test_an_adapter_of_ones_own():
    usual = SELECTION_SIGNATURES["topk"]
    mine = SelectionSignature("mine", usual.features, usual.call)
    report = conform(fast_topk, signature=mine, examples=0, seconds=SECONDS)
    assert report.proved
    assert report.facts["signature"] == "mine"


@pytest.mark.parametrize("name", SELECTION_SIGNATURES)
def test_every_case_has_its_top_k(name):
    """What is right by a sort is right, and without its best key is not."""
    features = SELECTION_SIGNATURES[name].features

    def holds(case: SelectionCase):
        for own in candidates_of(case, make_scores(case)):
            chosen = np.full(case.topk, -1)
            best = np.argsort(own, kind="stable")[::-1][: case.topk]
            chosen[: len(best)] = best
            assert is_topk(chosen, own, case.topk)
            if len(best):
                assert not is_topk(np.append(chosen[1:], -1), own, case.topk)

    for case in edge_cases(features):
        holds(case)
    given(cases(features))(settings(max_examples=40)(holds))()
