# SPDX-License-Identifier: Apache-2.0
"""`--html` of the commands that prove."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("click")
pytest.importorskip("jinja2")
pytest.importorskip("jsonschema")

from click.testing import CliRunner

from cpattn._cli.program import commands

ROWS = {"request": [0], "position": [0], "count": [2]}
PLAN = {"schema": "cpattn-plan/1", "requests": [{"extend": 3}], "ranks": [{"rows": ROWS}]}
SCRIPT = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
"""


def page_of(*arguments, status, path):
    result = CliRunner().invoke(commands, [*map(str, arguments), "--html", str(path)])
    assert result.exit_code == status, result.output
    return path.read_text(encoding="utf-8")


def test_a_plan_on_a_page(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    page = page_of("lint", plan, status=1, path=tmp_path / "report.html")
    assert "position 2 of request 0 is on no rank, not 1" in page
    assert 'fill="var(--bar)"' in page  # its bars are drawn


def test_a_program_on_a_page_with_its_timeline(tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "report.html"
    script.write_text(SCRIPT)
    result = CliRunner().invoke(
        commands, ["simulate", "--ranks", "3", "--html", str(path), str(script)]
    )
    assert result.exit_code == 0, result.output
    page = path.read_text(encoding="utf-8")
    assert "script.py on 3 ranks" in page
    assert "rank 2: all_reduce" in page


def test_an_operator_on_a_page(tmp_path):
    options = ("--signature", "cpattn", "--examples", "0")
    page = page_of(
        "conform", "cpattn:paged_attention", *options, status=0, path=tmp_path / "report.html"
    )
    assert "cpattn conform: cpattn:paged_attention" in page
    assert "Proved" in page


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(PLAN))
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(
        commands, ["lint", str(plan), "--html", str(tmp_path / "folder" / "none" / "r.html")]
    )
    assert result.exit_code in (1, 2)
    assert result.output.splitlines()[-1].startswith("Error: ")


def test_a_page_of_nothing_says_no_verdict(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    page = page_of("lint", plan, status=2, path=tmp_path / "report.html")
    assert "Proved" not in page
    assert "<title>cpattn: nothing was judged</title>" in page


def test_halves_of_characters_are_shown_by_their_numbers(tmp_path):
    """In a name within a plan, and in that of its file."""
    buffer = {"name": "slots \ud800", "size": 1, "used": 2}
    plan = tmp_path / "plan\udcff.json"
    plan.write_text(json.dumps({"schema": "cpattn-plan/1", "ranks": [{"buffers": [buffer]}]}))
    page = page_of("lint", "--json", plan, status=1, path=tmp_path / "report.html")
    assert "puts 2 elements into slots \\ud800" in page
    assert "plan\\udcff.json" in page


def test_a_page_of_many_tokens_is_small(tmp_path):
    """Ranks that take turns have as many ranges as tokens."""
    rows = [{"request": [0], "position": [r], "count": [9000], "step": [2]} for r in (0, 1)]
    rows[1]["count"] = [8999]
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": 18000}]}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(document | {"ranks": [{"rows": part} for part in rows]}))
    page = page_of("lint", plan, status=1, path=tmp_path / "report.html")
    assert "and 8980 more" in page
    assert len(page) < 20_000


def test_a_timeline_lasts_as_long_as_its_last_stretch():
    from cpattn.proof.page import Stretch
    from cpattn.proof.page.timeline import drawing

    many = [Stretch(0, "wait", float(i), i + 1.0, "wait") for i in range(4000)]
    drawn = drawing([*many, Stretch(0, "compute", 9999.5, 10_000.0, "compute")])
    assert drawn["milliseconds"] == 1e7
    assert drawn["left_out"] == 1
