# SPDX-License-Identifier: Apache-2.0
"""`cpattn lint` as people and programs use it, and its page."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("click")
pytest.importorskip("jsonschema")

from click.testing import CliRunner

from cpattn._cli.lint_command import commands
from cpattn.proof import lint
from support.places import ROOT
from support.proof.plans import document_of

PAGE = (ROOT / "docs" / "proof" / "lint.md").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command in a folder with a right plan, a wrong one, and a file that is none."""
    monkeypatch.chdir(tmp_path)
    right, wrong = (document_of([13, 40], [0, 64], 4) for _ in range(2))
    wrong["ranks"][1]["rows"]["count"][0] -= 1
    for name, document in {"right": right, "wrong": wrong, "none": {"schema": "x"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))

    def call(*arguments):
        return CliRunner().invoke(commands, ["lint", *arguments], prog_name="cpattn")

    return call


def test_exit_codes(run):
    assert run("right.json").exit_code == 0
    assert run("wrong.json").exit_code == 1
    assert run("none.json").exit_code == 2
    assert run("wrong.json", "none.json", "right.json").exit_code == 2
    assert run().exit_code == 2


def test_several_plans_are_all_judged(run):
    result = run("none.json", "wrong.json", "right.json")
    assert result.stderr == ("Error: none.json: schema must be 'cpattn-plan/1', got 'x'\n")
    assert "wrong.json: refuted, " in result.stdout
    assert "right.json: proved" in result.stdout
    assert "position 3 of request 0 is on no rank" in result.stdout


def test_programs_read_json(run):
    one = json.loads(run("--json", "wrong.json").stdout)
    assert one["schema"] == "cpattn-report/1"
    assert one["findings"][0]["invariant"] == "OWN"
    several = json.loads(run("--json", "wrong.json", "right.json").stdout)
    assert [report["proved"] for report in several] == [False, True]
    assert json.loads(run("--json", "wrong.json", "none.json").stdout)[0]["proved"] is False


def test_the_smaller_plan_is_written(run, tmp_path):
    result = run("right.json", "wrong.json", "--shrink-to", "small.json")
    assert "own-token: smaller plan written to small.json" in result.stdout
    small = json.loads((tmp_path / "small.json").read_text())
    assert len(small["requests"]) == 1
    assert lint(small, shrink=False).findings[0].kind == "own-token"
    json.loads(run("--json", "wrong.json", "--shrink-to", "small.json").stdout)


def test_a_file_that_cannot_be_written_is_said(run):
    result = run("wrong.json", "--shrink-to", "/dev/full")
    assert result.exit_code == 1
    assert "writing /dev/full: No space left on device" in result.stderr


def test_the_page_shows_what_comes_out(run):
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        exec(block, names)
    (shown,) = re.findall(r"^```console\n\$ cpattn lint plan.json\n(.*?)^```", PAGE, re.M | re.S)
    first, dots, _ = shown.partition("...\n")
    assert dots
    assert run("plan.json").stdout.startswith(first)


def test_the_page_has_every_part_of_the_schema():
    from cpattn.proof.linting import schema

    parts = set(schema()["properties"]) - {"schema", "name"}
    parts |= set(schema()["properties"]["ranks"]["items"]["properties"])
    assert {part for part in parts if f"{part}`" not in PAGE and f".{part}" not in PAGE} == set()
