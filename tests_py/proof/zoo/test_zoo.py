# SPDX-License-Identifier: Apache-2.0
"""Every bug of the zoo is refuted by its invariant, proved once mended, and shown to people."""

import dataclasses
import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
import zoo_table

from cpattn_proof import Finding, Report, lint
from cpattn_proof.commands import zoo as command
from cpattn_proof.zoo import ZooEntry, all_entries, registry, visit
from cpattn_proof.zoo.lint import beginnings
from support.command_line import invoke
from support.places import ROOT

ENTRIES = [
    pytest.param(entry, id=f"{entry.tool}-{entry.bug}", marks=marks)
    for entry in all_entries()
    for marks in [pytest.mark.slow if entry.tool == "conform" else ()]
]


@cache
def visited(entry):
    """Return the outcome of an entry, and its report of the broken form; each is made once."""
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
    if entry.tool == "conform":  # one fault may show itself in two ways
        kinds = {found.kind for found in report.findings}
        assert len(kinds) == 1 or kinds == {"merge-nan", "nan-on-empty"}
    for found in report.findings if entry.tool == "lint" else ():
        smaller = lint(found.details["smaller"], shrink=False)
        assert found.kind in {one.kind for one in smaller.findings}


def test_pages_name_all_of_them():
    page = (ROOT / "docs" / "how_to" / "sglang_ascend.md").read_text()
    five = page.partition("## Five bugs")[2]  # this project began with them
    named = {f"sgl-project/sglang#{number}" for number in re.findall(r"\(#(\d+)\)", five)}
    assert {entry.bug for entry in beginnings.ENTRIES} == named
    entries, bugs = len(all_entries()), len({entry.bug for entry in all_entries()})
    for page, said in (
        ("CHANGELOG.md", f"zoo`: {bugs} bugs that engines and libraries shipped, "),
        ("CHANGELOG.md", f" rebuilt small in {entries} entries, "),
        ("README.md", f"[{bugs} bugs that engines shipped](docs/proof/zoo.md)"),
        ("docs/proof/zoo.md", f" {entries} entries are of {bugs} bugs."),
    ):
        assert said in " ".join((ROOT / page).read_text().split()), page


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
    assert "on no rank" in zoo_table.comparable(page.read_text())


REFUTED = Report("lint", "plan", (Finding("OWN", "token 5 is on 2 ranks"),), checked=("OWN",))
PROVED = Report("lint", "plan", checked=("OWN",))


def entry(bug="foo/bar#1", invariant="OWN", broken=REFUTED, mended=PROVED, tool="lint"):
    link, story = f"https://example.invalid/{bug}", "Token 5 goes to two ranks."
    return ZooEntry(bug, link, tool, invariant, story, lambda: broken, lambda: mended)


@pytest.fixture
def shown(monkeypatch):
    def show(*arguments, entries):
        monkeypatch.setattr(command, "all_entries", lambda tools: entries)
        monkeypatch.setenv("COLUMNS", "160")
        result = invoke("zoo", *arguments)
        return result.exit_code, result.output

    return show


def test_what_is_refuted_and_mended_holds(shown):
    """A bug with entries for two tools counts as one bug."""
    status, text = shown(entries=[entry(), entry("foo/bar#2"), entry(tool="simulate")])
    assert status == 0
    assert "foo/bar#1" in text
    assert "token 5 is on 2 ranks" in text
    assert "3 entries of 2 bugs: all refuted, and proved once mended" in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"broken": PROVED}, "OWN is not among the findings; it says: nothing"),
        ({"invariant": "LEN"}, "LEN is not among the findings; it says: token 5"),
        ({"mended": REFUTED}, "the mended form is not proved"),
        ({"mended": Report("lint", "plan", checked=("LEN",))}, "the mended form is not proved"),
    ],
)
def test_what_is_not_told_apart_is_said(shown, given, says):
    status, text = shown(entries=[entry(**given), entry("foo/bar#2")])
    assert status == 1
    assert "! foo/bar#1" in text
    assert says in " ".join(text.split())
    assert "2 entries of 2 bugs: 1 not told apart" in text


def test_programs_read_json(shown):
    status, text = shown("--json", "--only", "#2", entries=[entry(), entry("foo/bar#2")])
    assert status == 0
    both = Report("lint", "plan", (Finding("LEN", "first"), Finding("OWN", "second")))
    assert visit(entry(broken=both)).says == "second"  # the finding of its invariant
    (outcome,) = json.loads(text)
    assert outcome["bug"] == "foo/bar#2"
    assert outcome["refuted"]
    assert outcome["proved"]


def test_entries_are_checked(monkeypatch):
    with pytest.raises(ValueError, match="tool must be one of lint, simulate, conform, got 'x'"):
        entry(tool="x")
    with pytest.raises(ValueError, match=r"invariant must be one of OWN, .*, got 'FOO'"):
        entry(invariant="FOO")
    module = SimpleNamespace(name="x", ENTRIES=(entry(),))
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda paths: [module])
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: module)
    with pytest.raises(ValueError, match=r"once for each tool, got foo/bar#1 \(lint\) again"):
        registry.all_entries()


def test_what_was_run_of_releases_names_its_test():
    shipped = [entry.shipped for entry in registry.all_entries() if entry.shipped]
    assert shipped
    for one in shipped:
        assert (ROOT / one.test).is_file()
        assert all((one.release, one.ran, one.says, one.mend))
