# SPDX-License-Identifier: Apache-2.0
"""The zoo as people see it: what is told apart, and what is said of what is not."""

from __future__ import annotations

import json

import pytest

from cpattn.proof import Finding, Report
from cpattn.proof.zoo import ZooEntry, __main__, registry, visit
from support.places import ROOT

REFUTED = Report("lint", "plan", (Finding("OWN", "token 5 is on 2 ranks"),), checked=("OWN",))
PROVED = Report("lint", "plan", checked=("OWN",))


def entry(bug="foo/bar#1", invariant="OWN", broken=REFUTED, mended=PROVED, tool="lint"):
    link, story = f"https://example.invalid/{bug}", "Token 5 goes to two ranks."
    return ZooEntry(bug, link, tool, invariant, story, lambda: broken, lambda: mended)


@pytest.fixture
def shown(monkeypatch, capsys):
    """Runs the command on some entries: exit code and output."""

    def show(*arguments, entries):
        monkeypatch.setattr(__main__, "all_entries", lambda: entries)
        monkeypatch.setenv("COLUMNS", "160")
        status = __main__.main(arguments)
        return status, capsys.readouterr().out

    return show


def test_what_is_refuted_and_mended_holds(shown):
    status, text = shown(entries=[entry(), entry("foo/bar#2")])
    assert status == 0
    assert "foo/bar#1" in text
    assert "token 5 is on 2 ranks" in text
    assert "2 bugs: all refuted, and proved once mended" in text


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
    assert "2 bugs: 1 are not told apart" in text


def test_programs_read_json(shown, capsys):
    status, text = shown("--json", "--only", "#2", entries=[entry(), entry("foo/bar#2")])
    assert status == 0
    (outcome,) = json.loads(text)
    assert outcome["bug"] == "foo/bar#2"
    assert outcome["refuted"]
    assert outcome["proved"]
    with pytest.raises(SystemExit, match="2"):
        shown("--only", "nonsense", entries=[entry()])
    assert "no bug of the zoo is called 'nonsense'" in capsys.readouterr().err


def test_entries_are_checked():
    with pytest.raises(ValueError, match="tool must be one of lint, simulate, conform, got 'x'"):
        entry(tool="x")
    with pytest.raises(ValueError, match=r"invariant must be one of OWN, .*, got 'FOO'"):
        entry(invariant="FOO")


def test_a_bug_is_in_the_zoo_once(monkeypatch):
    class Module:
        name, ENTRIES = "x", (entry(),)

    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda paths: [Module])
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: Module)
    with pytest.raises(ValueError, match=r"once for each tool, got foo/bar#1 \(lint\) again"):
        registry.all_entries()


def test_outcomes_name_the_finding_of_the_id():
    both = Report("lint", "plan", (Finding("LEN", "first"), Finding("OWN", "second")))
    assert visit(entry(broken=both)).says == "second"


def test_what_was_run_of_releases_names_its_test():
    shipped = [entry.shipped for entry in registry.all_entries() if entry.shipped]
    assert shipped
    for one in shipped:
        assert (ROOT / one.test).is_file()
        assert all((one.release, one.ran, one.says, one.mend))
