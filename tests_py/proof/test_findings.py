# SPDX-License-Identifier: Apache-2.0
"""What tools found, as people and programs read it."""

from __future__ import annotations

import json
import re

import pytest

from cpattn.proof import INVARIANTS, Finding, Report
from support.places import ROOT

TWICE = Finding(
    "OWN",
    "token 5 is on 2 ranks",
    where="request 0, token 5",
    ranks=(0, 1),
    picture="rank 0  0-5\n\nrank 1  5-9",
    details={"token": 5},
)


def test_a_finding_reads_like_an_error_of_a_compiler():
    assert TWICE.text().splitlines() == [
        "OWN: token 5 is on 2 ranks",
        "  --> ranks 0, 1: request 0, token 5",
        "   |",
        "   |  rank 0  0-5",
        "   |  ",
        "   |  rank 1  5-9",
        "   |",
        "   = rule: Every token, head and slot has one owner, and its position travels with it.",
        "   = why:  Rows are lost, computed twice or attended to at a wrong position: "
        "fluent nonsense.",
        "   = do:   Compare the arithmetic that cuts with the one that puts together again.",
        "   = see:  docs/proof/invariants.md#own",
    ]
    named = Finding("LSE", "rows differ", kind="lse-base-2", ranks=(3,), advice="Take base e.")
    assert named.text().startswith("LSE lse-base-2: rows differ\n  --> rank 3\n   = rule:")
    assert "   = do:   Take base e.\n" in named.text()


def test_an_unknown_invariant_is_refused():
    with pytest.raises(ValueError, match=r"invariant must be one of OWN, COV, .*, got 'FOO'"):
        Finding("FOO", "bar")


def test_a_report_ends_with_its_verdict():
    proved = Report("lint", "plan.json", checked=("OWN", "LEN"), not_checked={"BAL": "no bound"})
    assert proved.proved
    assert proved.exit_code == 0
    assert proved.text().splitlines() == [
        "plan.json: proved (0.0 s)",
        "  checked: OWN LEN",
        "  not checked: BAL, no bound",
    ]
    refuted = Report("lint", "plan.json", (TWICE,), checked=("OWN",), seconds=0.25)
    assert refuted.exit_code == 1
    assert "\n\nplan.json: refuted, 1 finding (0.2 s)\n" in refuted.text()
    document = json.loads(refuted.to_json())
    assert document["schema"] == "cpattn-report/1"
    assert not document["proved"]
    assert document["findings"][0]["details"] == {"token": 5}


def test_a_report_has_no_number_that_is_none():
    with pytest.raises(ValueError, match="not JSON compliant"):
        Report("lint", "plan", facts={"error": float("nan")}).to_json()


def test_the_page_has_a_section_for_each_invariant():
    page = (ROOT / "docs" / "proof" / "invariants.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(INVARIANTS)
    for invariant in INVARIANTS.values():
        assert f"\n{invariant.rule}\n" in page
