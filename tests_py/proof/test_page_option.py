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


@pytest.fixture
def page_of(tmp_path):
    """The page that a command writes."""

    def call(*arguments, status):
        path = tmp_path / "report.html"
        result = CliRunner().invoke(commands, [*map(str, arguments), "--html", str(path)])
        assert result.exit_code == status, result.output
        return path.read_text(encoding="utf-8")

    return call


@pytest.fixture
def lint(tmp_path, page_of):
    """The page of a plan."""

    def call(document, status=1, options=(), name="plan.json"):
        (tmp_path / name).write_text(json.dumps(document))
        return page_of("lint", *options, tmp_path / name, status=status)

    return call


def test_a_plan_on_a_page(lint):
    page = lint(PLAN)
    assert "position 2 of request 0 is on no rank, not 1" in page
    assert 'fill="var(--bar)"' in page  # its bars are drawn
    page = lint({}, status=2)
    assert "Proved" not in page
    assert "<title>cpattn: nothing was judged</title>" in page


def test_a_program_on_a_page_with_its_timeline(tmp_path, page_of):
    (tmp_path / "script.py").write_text(SCRIPT)
    page = page_of("simulate", "--ranks", "3", tmp_path / "script.py", status=0)
    assert "script.py on 3 ranks" in page
    assert "rank 2: all_reduce" in page


def test_an_operator_on_a_page(page_of):
    options = ("--signature", "cpattn", "--examples", "0")
    page = page_of("conform", "cpattn:paged_attention", *options, status=0)
    assert "cpattn conform: cpattn:paged_attention" in page
    assert "Proved" in page


def test_a_page_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    path = tmp_path / "none" / "r.html"
    result = CliRunner().invoke(commands, ["lint", f"{tmp_path}/plan.json", "--html", str(path)])
    assert result.exit_code in (1, 2)
    assert result.output.splitlines()[-1].startswith("Error: ")


def test_halves_of_characters_are_shown_by_their_numbers(lint):
    """In a name within a plan, and in that of its file."""
    buffer = {"name": "slots \ud800", "size": 1, "used": 2}
    document = {"schema": "cpattn-plan/1", "ranks": [{"buffers": [buffer]}]}
    page = lint(document, options=["--json"], name="plan\udcff.json")
    assert "puts 2 elements into slots \\ud800" in page
    assert "plan\\udcff.json" in page


def test_a_page_of_many_tokens_is_small(lint):
    """Ranks that take turns have as many ranges as tokens."""
    rows = [{"request": [0], "position": [r], "count": [9000 - r], "step": [2]} for r in (0, 1)]
    document = {"schema": "cpattn-plan/1", "requests": [{"extend": 18000}]}
    page = lint(document | {"ranks": [{"rows": part} for part in rows]})
    assert "and 8980 more" in page
    assert len(page) < 20_000
