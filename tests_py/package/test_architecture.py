# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md and pictures of the documents say what sources say and scripts draw.

Notebooks run from beginning to end on less traffic, and are stored as they ran.
"""

import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import architecture
import concept_pictures
import pytest

from support.places import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_a_floor_that_knows_another_needs_an_arrow(monkeypatch):
    floors = [
        {**floor, "floors": ["kernels"]} if floor["name"] == "meta" else floor
        for floor in architecture.LAYERS["floor"]
    ]
    monkeypatch.setitem(architecture.LAYERS, "floor", floors)
    with pytest.raises(ValueError, match=r"arrows without a route.*'meta', 'kernels'"):
        architecture.floors()


def test_pictures_are_well_formed_and_shown():
    for path in (ROOT / "docs" / "images").glob("*.svg"):
        assert int(ElementTree.fromstring(path.read_text()).attrib["width"]) <= 700
        assert f"(images/{path.name})" in PAGE
    for script in (architecture, concept_pictures):  # `make lint` compares them with what is drawn
        assert {path.stem for path in script.IMAGES.glob("*.svg")} == script.PICTURES.keys()


def paths_of(text: str) -> list[str]:
    """Return what looks like a path from the root, among the words in backticks."""
    words = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    pattern = r"(?!/)(\.?[\w*-]+(/[\w.*-]*)+|[\w-]+\.(md|toml|txt))"
    return [word for word in words if re.fullmatch(pattern, word)]


def test_paths_of_the_page_exist():
    text = "`cpp/base/isa.cc` `cpp/isa/dense_*.cc` `a / b` `x` `/y/z` ```\n`b/c`\n``` `CHANGES.md`"
    assert paths_of(text) == ["cpp/base/isa.cc", "cpp/isa/dense_*.cc", "CHANGES.md"]
    assert len(paths_of(PAGE)) > 60
    assert [path for path in paths_of(PAGE) if not any(ROOT.glob(path))] == []


@pytest.fixture(params=[architecture, concept_pictures], ids=lambda script: script.__name__)
def script(request, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["the script", "--check"])
    return request.param


def test_a_stale_picture_is_found_and_a_missing_one_written(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "IMAGES", tmp_path)
    monkeypatch.setattr(script, "PICTURES", {"old": lambda: "<svg>1</svg>", "new": str})
    stale, missing = tmp_path / "old.svg", tmp_path / "new.svg"
    stale.write_text("<svg/>")
    assert script.main() == 1
    said = f"old.svg, new.svg: out of date; run python scripts/{script.__name__}.py\n"
    assert capsys.readouterr().out == said
    assert stale.read_text() == "<svg/>"
    assert not missing.exists()
    monkeypatch.setattr(sys, "argv", ["the script"])
    assert script.main() == 0
    assert (stale.read_text(), missing.read_text()) == ("<svg>1</svg>", "")


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
#: These options make the work of a test smaller.
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
