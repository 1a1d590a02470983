# SPDX-License-Identifier: Apache-2.0
"""Every bug that integers refute is refuted, and proved once mended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("jsonschema")

from cpattn.proof.zoo import all_entries, visit
from cpattn.proof.zoo.lint import beginnings

ENTRIES = [entry for entry in all_entries() if entry.tool == "lint"]


def test_they_are_many_and_of_many_kinds():
    assert len(ENTRIES) >= 30
    assert {entry.invariant for entry in ENTRIES} >= {
        "OWN", "COV", "LEN", "SEQ", "XFER", "TOPK", "ADDR"
    }  # fmt: skip


def test_the_five_with_which_this_project_began():
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "sglang_ascend.md").read_text()
    five = page.partition("## Five bugs")[2]
    named = {f"sgl-project/sglang#{number}" for number in re.findall(r"\(#(\d+)\)", five)}
    assert {entry.bug for entry in beginnings.ENTRIES} == named


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.bug)
def test_a_bug_is_refuted_and_its_mended_form_proved(entry):
    outcome = visit(entry)
    assert outcome.refuted, outcome.says
    assert outcome.proved
    assert entry.story.endswith(".")
    assert entry.link.startswith("https://github.com/")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.bug)
def test_the_smaller_document_shows_the_bug(entry):
    for found in entry.broken().findings:
        from cpattn.proof import lint

        smaller = lint(found.details["smaller"], shrink=False)
        assert found.kind in {one.kind for one in smaller.findings}
