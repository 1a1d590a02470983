# SPDX-License-Identifier: Apache-2.0
"""Programs of examples/, run as their docstrings say."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from support.children import path_with
from support.places import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Last line of each successful program.
LAST = {
    "move_kv": r"checksums: prefill (\w{8}), decode \1",
    "own_engine": r"prompt of \d+: \[\d.*\], as the oracle has it",
    "sparse_attention": r"two ranks, \[70, 70\] tokens: the same bits",
}


def commands_of(example: Path) -> list[str]:
    text = ast.get_docstring(ast.parse(example.read_text()))
    return [line.split(" # ")[0].strip() for line in text.splitlines() if " examples/" in line]


OF_TUTORIALS = {"context_parallel_prefill"}  # tests of tutorials run it
#: Longer examples: half of the server handles reading, refusing, streaming and leaving clients. It
#: has a separate file of tests.
LONGEST = {"serve_over_ranks": 250}
NEEDS_CUDA = {"gpu_ring": "gpu_ring.py: needs a CUDA device, and torch has none here"}


@pytest.mark.parametrize("name", LAST)
def test_an_example_runs(name, tmp_path, children):
    """The first form runs here; the tutorials run other forms."""
    run = example(name, tmp_path, children)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(LAST[name], run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NEEDS_CUDA)
def test_an_example_for_gpus_passes_or_says_that_there_is_none(name, tmp_path, children):
    run = example(name, tmp_path, children)
    if pytest.importorskip("torch").cuda.is_available():
        assert run.stdout.splitlines()[-1] == "passed", run.stderr
    else:
        assert (run.returncode, run.stderr.strip()) == (1, NEEDS_CUDA[name])


def example(name, tmp_path, children):
    if name in {"sparse_attention", *NEEDS_CUDA}:
        pytest.importorskip("torch")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": path_with(),
    }
    command = commands_of(ROOT / "examples" / f"{name}.py")[0]
    return children.run(["sh", "-c", command], cwd=tmp_path, env=environment)


def test_all_examples_are_short_run_and_in_the_index():
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= LONGEST.get(path.stem, 125)
        assert f"examples/{path.name}" in commands_of(path)[0]
    names = [path.stem for path in EXAMPLES]
    assert names == sorted({*LAST, *OF_TUTORIALS, *NEEDS_CUDA, *LONGEST})
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)\.py`", index, re.MULTILINE)) == names
