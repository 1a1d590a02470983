# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from beginning to end, and are stored as they ran."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.places import ROOT

pytestmark = pytest.mark.slow


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path):
    command = [sys.executable, ROOT / "scripts" / "run_notebooks.py", path]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_what_they_show(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not any(output["output_type"] == "error" for output in outputs)
