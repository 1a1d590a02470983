# SPDX-License-Identifier: Apache-2.0
"""Operators with one fault each are diagnosed by its name, and by no other."""

from __future__ import annotations

import re

import pytest

import cpattn
from cpattn.proof import conform
from cpattn.proof.conformance import FAULTS
from support.proof.conformance import SECONDS, broken

OPERATORS = {name: getattr(broken, name.replace("-", "_"), None) for name in FAULTS}
OPERATORS["16-bit-accumulation"] = broken.accumulates_in_16_bits
SECONDS_OF_HANG = 1.0

# Each stands for others like it where time is short.
QUICK = ("lse-base-2", "mask-off-by-one", "overflow-32-bit", "page-size", "crash")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FAULTS]
)
def test_a_fault_is_named(name):
    signature = "flash_attn_varlen" if name == "pad-rows-read" else "cpattn"
    report = conform(
        OPERATORS[name],
        signature=signature,
        examples=0,
        time_limit=SECONDS_OF_HANG,
        seconds=SECONDS,
    )
    assert [finding.kind for finding in report.findings] == [name], report.text()
    (finding,) = report.findings
    assert finding.invariant == FAULTS[name].invariant
    assert finding.where
    assert finding.picture
    assert report.exit_code == 1
    report.to_json()  # all details are JSON


def test_a_flag_beside_masks_that_are_tensors_is_tried():
    report = conform(broken.sdpa_without_is_causal, signature="sdpa", examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == ["mask-ignored"], report.text()


def test_hidden_values_that_some_rows_multiply_are_read_beyond_the_length():
    """No oracle has rows that read a page beside others that skip it; NaN alone tells."""
    report = conform(
        broken.multiplies_hidden_values, signature="cpattn", examples=0, seconds=SECONDS
    )
    assert [finding.kind for finding in report.findings] == ["reads-beyond-length"], report.text()
    assert "is NaN" in report.findings[0].what
    assert report.findings[0].details["only_when"]["poison"] is True


def test_what_has_no_name_shows_where_it_is():
    report = conform(broken.unknown, signature="cpattn", examples=0, seconds=SECONDS)
    (finding,) = report.findings
    assert finding.kind == "unknown"
    assert re.match(r"row \d+, head \d: out\[\d+\] is \S+, not \S+\n", finding.picture)
    wrong = r"^wrong: .*rows?\b.*, .*heads?\b.*, \d+ of \d+ in all$"
    assert re.search(wrong, finding.picture, re.M)
    assert re.search(r"^row +\d+ keys [+.-]*\+", finding.picture, re.M)  # half as much again


def test_two_faults_have_two_names():
    """The log-sum-exp is diagnosed by itself where the output is right."""

    def operator(q, k, v, **options):
        out, lse = broken.window_ignored(q, k, v, **options)
        return out, lse / broken.LN2

    report = conform(operator, signature="cpattn", examples=0, seconds=SECONDS)
    assert {finding.kind for finding in report.findings} == {"window-ignored", "lse-base-2"}


def test_each_of_two_faults_has_its_own_cases():
    def operator(q, k, v, *, window=None, softcap=0.0, **options):
        return cpattn.paged_attention(q, k, v, **options)

    report = conform(operator, signature="cpattn", examples=0, seconds=SECONDS)
    found = {finding.kind: finding.details for finding in report.findings}
    assert set(found) == {"window-ignored", "softcap-ignored"}, report.text()
    assert [details["cases"] for details in found.values()] == [2, 1]
    assert found["window-ignored"]["case"]["window"] is not None
    assert found["softcap-ignored"]["only_when"]["softcap"] == 1.0


def test_far_memory_has_a_name_beside_another_fault():
    def operator(q, k, v, *, window=None, **options):
        return broken.overflow_32_bit(q, k, v, **options)

    report = conform(operator, signature="cpattn", examples=0, seconds=SECONDS)
    found = {finding.kind: finding.details for finding in report.findings}
    assert set(found) == {"window-ignored", "overflow-32-bit"}, report.text()
    assert found["overflow-32-bit"]["case"]["far"] is True
    assert (found["overflow-32-bit"]["cases"], found["window-ignored"]["cases"]) == (1, 2)


def test_nan_of_the_log_sum_exp_alone_is_named():
    report = conform(broken.nan_lse_on_empty, signature="cpattn", examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == ["nan-on-empty"], report.text()
    assert "the log-sum-exp is NaN" in report.findings[0].what


def test_infinities_are_shown_without_a_warning():
    report = conform(broken.infinite, signature="cpattn", examples=0, seconds=SECONDS)
    assert [finding.kind for finding in report.findings] == ["unknown"], report.text()
    assert "keys ?" in report.findings[0].picture


def test_a_case_is_made_smaller():
    report = conform(broken.lse_base_2, signature="cpattn", examples=0)
    assert report.findings[0].where == "q_lens=[1], kv_lens=[1]"
    assert report.findings[0].details["oracle"] == {"lse_factor": 1 / broken.LN2}


def test_what_failing_cases_share_is_told():
    report = conform(broken.crash, signature="cpattn", examples=0, seconds=SECONDS)
    assert report.findings[0].details["only_when"]["window"] == 3
    assert "SIGSEGV" in report.findings[0].what


def test_weights_that_moved_are_shown():
    """Values of few keys tell the weights: the last key that a row sees is hidden from it."""
    report = conform(broken.mask_off_by_one, signature="cpattn", examples=0, seconds=SECONDS)
    assert "row   0 keys -" in report.findings[0].picture
