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
FEW = ("--examples 2000 --seconds 600", "--examples 5 --seconds 3")  # of cases, in a test


def workflow():
    (block,) = (block for block in blocks_in(PAGE) if block.language == "yaml")
    return yaml.safe_load(block.text)


def commands():
    """What its steps run, by name, but for installations."""
    steps = workflow()["jobs"]["conform"]["steps"]
    return {step["name"]: step["run"] for step in steps if "run" in step}


def run(name, folder, children):
    """As a runner does: it stops at the first command that fails."""
    here = {
        **os.environ, "PYTHONPATH": path_with(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    command = commands()[name].replace(*FEW)
    return children.run(["bash", "-e", "-c", command], cwd=folder, env=here, timeout=PATIENCE)


def test_the_workflow_is_one():
    assert list(commands()) == ["Install", "Test operators", "Try many more cases"]
    assert FEW[0] in commands()["Try many more cases"]
    triggers = workflow()[True]  # "on" is true in YAML 1.1
    assert set(triggers) == {"push", "schedule"}


@pytest.mark.slow
def test_the_page_shows_what_comes_out_and_its_last_step_passes(tmp_path, children):
    run_page(PAGE, tmp_path, children)  # with the step that tests operators
    ran = run("Try many more cases", tmp_path, children)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reports = {path.name for path in (tmp_path / "reports").iterdir()}
    assert reports == {"attention.html", "select.html"}


@pytest.mark.slow
def test_its_steps_fail_where_an_operator_is_wrong(tmp_path, children):
    for block in blocks_in(PAGE):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.text)
    path = tmp_path / "kernels.py"
    path.write_text(path.read_text().replace(", -1)\n    return", ", 0)\n    return"))
    assert run("Test operators", tmp_path, children).returncode == 1
    ran = run("Try many more cases", tmp_path, children)
    assert ran.returncode == 1, ran.stderr
    assert "TOPK topk-padding: kernels:select fills rows" in ran.stdout
    assert (tmp_path / "reports" / "select.html").exists()
