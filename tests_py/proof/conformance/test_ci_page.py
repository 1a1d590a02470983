# SPDX-License-Identifier: Apache-2.0
"""The page about CI does what it shows, and the commands of its workflow pass and fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from support.children import path_with
from support.pages import blocks_in, run_page
from support.places import ROOT
from support.time_limits import PATIENCE

PAGE = ROOT / "docs" / "proof" / "ci.md"
FEW = ("--examples 2000 --seconds 600", "--examples 5 --seconds 10")  # of cases, in a test


def workflow():
    (block,) = (block for block in blocks_in(PAGE) if block.language == "yaml")
    return yaml.safe_load(block.text)


def commands():
    """What its steps run, by name, but for installations."""
    steps = workflow()["jobs"]["conform"]["steps"]
    return {step["name"]: step["run"] for step in steps if "run" in step}


@pytest.fixture
def folder(tmp_path):
    for block in blocks_in(PAGE):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.text)
    return tmp_path


def run(command, folder, children):
    """As a runner does: it stops at the first command that fails."""
    here = {
        **os.environ, "PYTHONPATH": path_with(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    return children.run(
        ["bash", "-e", "-c", command.replace(*FEW)], cwd=folder, env=here, timeout=PATIENCE
    )


@pytest.mark.slow
def test_the_page_shows_what_comes_out(tmp_path, children):
    run_page(PAGE, tmp_path, children)


def test_the_workflow_is_one():
    assert list(commands()) == ["Install", "Test operators", "Try many more cases"]
    triggers = workflow()[True]  # "on" is true in YAML 1.1
    assert set(triggers) == {"push", "schedule"}


@pytest.mark.slow
def test_its_steps_pass(folder, children):
    assert FEW[0] in commands()["Try many more cases"]
    for name in ("Test operators", "Try many more cases"):
        ran = run(commands()[name], folder, children)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {path.name for path in (folder / "reports").iterdir()} == {
        "attention.html", "select.html"
    }  # fmt: skip


@pytest.mark.slow
def test_its_steps_fail_where_an_operator_is_wrong(folder, children):
    path = folder / "kernels.py"
    path.write_text(path.read_text().replace(", -1)\n    return", ", 0)\n    return"))
    assert run(commands()["Test operators"], folder, children).returncode == 1
    ran = run(commands()["Try many more cases"], folder, children)
    assert ran.returncode == 1, ran.stderr
    assert "TOPK topk-padding: kernels:select fills rows" in ran.stdout
    assert (folder / "reports" / "select.html").exists()
