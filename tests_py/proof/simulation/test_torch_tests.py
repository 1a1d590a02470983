# SPDX-License-Identifier: Apache-2.0
"""torch's own tests of process groups pass on simulated ranks, but for those that say why not."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from support.places import ROOT
from support.proof.torch_tests import LEFT_OUT, reason_of, rows_of
from support.time_limits import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory, module_children):
    """Return each test's outcome, of a new process: torch reads the environment on import."""
    path = tmp_path_factory.mktemp("torch") / "found.json"
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "support.proof.torch_tests", str(path)]
    run = module_children.run(command, env={**os.environ, **own}, timeout=4 * PATIENCE)
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())


def test_all_pass_but_those_that_cannot_run(found):
    failed = {
        name: outcome
        for name, outcome in found.items()
        if outcome.startswith("failed") and not reason_of(name, outcome)
    }
    assert not failed
    assert sum(outcome == "passed" for outcome in found.values()) > 100


@pytest.mark.parametrize("names", [names for names, _, _ in LEFT_OUT])
def test_what_is_left_out_really_fails(found, names):
    assert any(
        re.search(names, name) and outcome.startswith("failed") for name, outcome in found.items()
    )


def test_the_page_has_the_table(found):
    page = (ROOT / "docs" / "proof" / "simulate.md").read_text(encoding="utf-8")
    assert "\n".join(rows_of(found)) in page
