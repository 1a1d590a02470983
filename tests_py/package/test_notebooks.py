# SPDX-License-Identifier: Apache-2.0
"""The notebooks run from beginning to end on less traffic, and are stored as they ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.places import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: What makes the work of a test smaller.
SMALLER = {
    "compare_strategies": {
        "generate_trace(400)": "generate_trace(60)",
        "token_budget=8192": "token_budget=1024",
        "range(1, 161)": "range(1, 161, 8)",
    },
    "profile_cp_prefill": {"[3000, 1100]": "[700, 300]", "[5000, 0]": "[900, 0]"},
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    text = path.read_text()
    for usual, smaller in SMALLER[path.stem].items():
        assert usual in text
        text = text.replace(usual, smaller)
    (tmp_path / path.name).write_text(text)
    command = [sys.executable, ROOT / "scripts" / "run_notebooks.py", tmp_path / path.name]
    environment = {name: value for name, value in os.environ.items() if name != "CPATTN_TRACE"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_with_what_they_show(path):
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not any(output["output_type"] == "error" for output in outputs)
