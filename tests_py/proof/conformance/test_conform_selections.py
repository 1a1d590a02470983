# SPDX-License-Identifier: Apache-2.0
"""Right operators that select keys raise no finding, and each fault is named."""

import pytest

from cpattn.sparse.sglang_0_5_23 import fast_topk
from cpattn_proof import NotUsable, conform
from cpattn_proof.conformance import SELECTION_FAULTS
from support.proof.conformance import AT_EDGES, SECONDS_TO_SHRINK
from support.proof.conformance import broken_selections as broken
from support.proof.conformance.right_operators import SELECTIONS
from support.time_limits import PATIENCE


def report_of(operator, signature="topk", **options):
    return conform(operator, signature=signature, **{**AT_EDGES, **options})


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_right_raises_no_finding(name):
    operator = SELECTIONS[name]
    report = conform(
        operator.path, signature=operator.signature, examples=40, without=operator.without,
        time_limit=PATIENCE,
    )  # fmt: skip
    assert report.proved, report.text()
    assert report.checked == ("OWN", "LEN", "TOPK", "PAD")
    assert report.facts["refused"] == {}
    assert report.facts["answered"] >= 40


@pytest.mark.parametrize("name", SELECTION_FAULTS)
def test_a_fault_is_named(name):
    """A bucket that overflows is shown by its smallest case: one key more than it has slots."""
    crowded = name == "topk-bucket-overflow"
    options = {"seconds": SECONDS_TO_SHRINK, "without": ["low", "nan"]} if crowded else {}
    report = report_of(broken.operator_of(name), **options)
    assert [finding.kind for finding in report.findings] == [name], report.text()
    (finding,) = report.findings
    assert finding.invariant == "TOPK"
    assert finding.where
    assert "row " in finding.picture
    assert report.exit_code == 1
    report.to_json()
    if crowded:
        assert finding.details["case"]["lengths"] == (broken.BUCKET_SLOTS + 1,)
        assert "missing:" in finding.picture


@pytest.mark.parametrize(
    ("operator", "signature", "kind", "invariant"),
    [
        (broken.operator_of("crash"), "topk", "crash", "ADDR"),
        (broken.operator_of("raises"), "topk", "raises", "LEN"),
        (broken.operator_of("wrong-form"), "topk", "wrong-form", "ADDR"),
        (broken.indexer_without_starts, "indexer_topk", "topk-local-ids", "TOPK"),
        (broken.global_ids, "dcp_local_indices", "topk-local-ids", "TOPK"),
    ],
)
def test_other_faults_are_named(operator, signature, kind, invariant):
    """A missing answer is named, and so are global ids in place of local ones."""
    found = report_of(operator, signature).findings
    assert [(finding.kind, finding.invariant) for finding in found] == [(kind, invariant)]


def test_what_answers_nothing_cannot_be_judged():
    with pytest.raises(NotUsable, match=r"none of .* wrong-form, indices must be integers"):
        report_of(broken.operator_of("no-integers"))


def test_the_union_of_ranks_must_be_the_top_k():
    report = report_of(broken.other_interleave, "dcp_local_indices")
    assert not report.proved
    assert {finding.invariant for finding in report.findings} == {"TOPK"}


def test_what_is_not_claimed_is_not_tried():
    assert report_of(broken.operator_of("topk-local-ids"), without=["starts"]).proved
    with pytest.raises(ValueError, match="must be of starts, empty, high, low, nan, got 'ranks'"):
        conform(fast_topk, signature="topk", without=["ranks"])
