# SPDX-License-Identifier: Apache-2.0
"""Every bug of the zoo is refuted by its invariant, and proved once mended; the page says so."""

from __future__ import annotations

import dataclasses
import re
from functools import cache

import pytest

for name in ("torch", "hypothesis", "jsonschema"):
    pytest.importorskip(name)

import zoo_table  # noqa: E402

from cpattn.proof import lint  # noqa: E402
from cpattn.proof.zoo import all_entries, visit  # noqa: E402
from cpattn.proof.zoo.lint import beginnings  # noqa: E402
from support.places import ROOT  # noqa: E402

ENTRIES = [
    pytest.param(entry, id=f"{entry.tool}-{entry.bug}", marks=marks)
    for entry in all_entries()
    for marks in [pytest.mark.slow if entry.tool == "conform" else ()]
]
# Of what the tool says of operators; a bug of another tool has one kind of finding.
KINDS = {
    "vllm-project/vllm#39148": {"merge-nan", "nan-on-empty"},
    "vllm-project/vllm#49294": {"lse-finite-on-empty"},
    "flashinfer-ai/flashinfer#4452": {"lse-finite-on-empty"},
    "sgl-project/sglang#35045": {"merge-wrong-base"},
    "NVIDIA/TransformerEngine#3551": {"sink-ignored"},
    "PrimeIntellect-ai/prime-rl#3397": {"sink-ignored"},
    "vllm-project/vllm#47671": {"overflow-32-bit"},
    "local-inference-lab/b12x#55": {"topk-bucket-overflow"},
    "vllm-project/vllm#54541": {"topk-local-ids"},
}


@cache
def visited(entry):
    """What the tool says of an entry, and its report of what is broken; once for all tests."""
    reports = []

    def broken():
        reports.append(entry.broken())
        return reports[0]

    return visit(dataclasses.replace(entry, broken=broken)), reports[0]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_bug_is_refuted_and_its_mended_form_proved(entry):
    outcome, report = visited(entry)
    assert outcome.refuted, outcome.says
    assert outcome.proved, entry.mended().text()
    assert entry.story.endswith(".")
    assert entry.link.startswith("https://github.com/")
    if entry.tool == "conform":
        assert {found.kind for found in report.findings} <= KINDS[entry.bug]
    for found in report.findings if entry.tool == "lint" else ():
        smaller = lint(found.details["smaller"], shrink=False)
        assert found.kind in {one.kind for one in smaller.findings}


def test_they_are_many_and_of_many_kinds():
    of_plans = [entry for entry in all_entries() if entry.tool == "lint"]
    assert len(of_plans) >= 30
    assert {"OWN", "COV", "LEN", "SEQ", "XFER", "TOPK", "ADDR"} <= {e.invariant for e in of_plans}
    of_programs = {entry.bug for entry in all_entries() if entry.tool == "simulate"}
    assert {bug.partition("/")[2] for bug in of_programs} == {
        "vllm-ascend#12036",
        "TensorRT-LLM#14020",
        "sglang#30760",
        "ART#840",
        "DeepSpeed#7384",
    }


def test_the_five_with_which_this_project_began():
    page = (ROOT / "docs" / "how_to" / "sglang_ascend.md").read_text()
    five = page.partition("## Five bugs")[2]
    named = {f"sgl-project/sglang#{number}" for number in re.findall(r"\(#(\d+)\)", five)}
    assert {entry.bug for entry in beginnings.ENTRIES} == named


@pytest.mark.slow
def test_the_table_is_what_the_tools_say(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(zoo_table, "visit", lambda entry: visited(entry)[0])
    assert zoo_table.main(["--check"]) == 0
    page = tmp_path / "zoo.md"
    page.write_text(zoo_table.PAGE.read_text().replace("on no rank", "on a rank"))
    monkeypatch.setattr(zoo_table, "PAGE", page)
    assert zoo_table.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("zoo.md: out of date; run python scripts/zoo_table.py\n")
    assert "on a rank" in said
    assert zoo_table.main([]) == 0
    written = zoo_table.comparable(page.read_text())
    assert "on no rank" in written


def test_the_changelog_counts_the_bugs():
    text = (ROOT / "CHANGELOG.md").read_text()
    (count,) = re.findall(r"`python -m cpattn\.proof\.zoo`: (\d+) bugs", text)
    assert len({entry.bug for entry in all_entries()}) == int(count)
