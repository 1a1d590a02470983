# SPDX-License-Identifier: Apache-2.0
"""Operators with one fault each are diagnosed by its name, and by no other."""

from __future__ import annotations

import re

import pytest
import torch

from cpattn.proof import conform
from cpattn.proof.conformance import FAULTS
from support.proof.conformance import AT_EDGES, SECONDS_TO_SHRINK, broken

SECONDS_OF_HANG = 1.0
# Each stands for others like it where time is short.
QUICK = ("mask-off-by-one", "overflow-32-bit", "crash")


def report_of(operator, signature="cpattn", **options):
    return conform(operator, signature=signature, **{**AT_EDGES, **options})


def the_finding(report, kind):
    """The only one there is."""
    assert [finding.kind for finding in report.findings] == [kind], report.text()
    return report.findings[0]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FAULTS]
)
def test_a_fault_is_named(name):
    signature = "flash_attn_varlen" if name == "pad-rows-read" else "cpattn"
    report = report_of(broken.operator_of(name), signature, time_limit=SECONDS_OF_HANG)
    finding = the_finding(report, name)
    assert finding.invariant == FAULTS[name].invariant
    assert finding.where
    assert finding.picture
    assert report.exit_code == 1
    report.to_json()  # all details are JSON
    if name == "crash":
        assert finding.details["only_when"]["window"] == 3  # what failing cases share
        assert "SIGSEGV" in finding.what
    if name == "mask-off-by-one":  # values of few keys tell the weights: its own key is hidden
        assert re.search(r"^row +\d+ keys [+.]*-", finding.picture, re.M)
    if name == "unknown":
        assert re.match(r"row \d+, head \d: out\[\d+\] is \S+, not \S+\n", finding.picture)
        wrong = r"^wrong: .*rows?\b.*, .*heads?\b.*, \d+ of \d+ in all$"
        assert re.search(wrong, finding.picture, re.M)
        assert re.search(r"^row +\d+ keys [+.-]*\+", finding.picture, re.M)  # half as much again


def test_a_flag_beside_masks_that_are_tensors_is_tried():
    the_finding(report_of(broken.sdpa_without_is_causal, "sdpa"), "mask-ignored")


def test_hidden_values_that_some_rows_multiply_are_read_beyond_the_length():
    """No oracle has rows that read a page beside others that skip it; NaN alone tells."""
    finding = the_finding(report_of(broken.multiplies_hidden_values), "reads-beyond-length")
    assert "is NaN" in finding.what
    assert finding.details["only_when"]["poison"] is True


def both(change):
    """An operator that ignores windows, and has one more fault."""
    return lambda *tensors, window=None, **options: change(*tensors, **options)


@pytest.mark.slow
@pytest.mark.parametrize("second", ["lse-base-2", "softcap-ignored", "overflow-32-bit"])
def test_two_faults_have_two_names_and_cases_of_their_own(second):
    """The log-sum-exp is diagnosed by itself where the output is right."""
    report = report_of(both(broken.operator_of(second)))
    found = {finding.kind: finding.details for finding in report.findings}
    assert set(found) == {"window-ignored", second}, report.text()
    assert found["window-ignored"]["case"]["window"] is not None
    assert found["window-ignored"]["cases"] == 2
    if second != "lse-base-2":
        assert found[second]["cases"] == 1
        assert found[second]["case"]["far"] is (second == "overflow-32-bit")
        assert (found[second]["only_when"]["softcap"] == 1.0) == (second == "softcap-ignored")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (
            lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, torch.nan)),
            "nan-on-empty",
            "the log-sum-exp is NaN",
        ),
        (broken.infinite, "unknown", "keys ?"),  # and nothing warns
    ],
)
def test_what_is_no_number_is_shown(change, kind, says):
    finding = the_finding(report_of(broken.returning(change)), kind)
    assert says in finding.what + finding.picture


@pytest.mark.slow
def test_a_case_is_made_smaller():
    report = report_of(broken.operator_of("lse-base-2"), seconds=SECONDS_TO_SHRINK)
    finding = the_finding(report, "lse-base-2")
    assert finding.where == "q_lens=[1], kv_lens=[1]"
    assert finding.details["oracle"] == {"lse_factor": 1 / broken.LN2}
