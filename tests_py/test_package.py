# SPDX-License-Identifier: Apache-2.0
"""The package as its users get it: imports, versions, stubs' exports, documents."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cpattn

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

NEW_MODULES = """
import sys, numpy
before = set(sys.modules)
import cpattn
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""


def test_import_brings_nothing_but_numpy():
    run = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["cpattn"]


def test_one_version_everywhere():
    def first(pattern, path):
        return re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)[1]

    assert first(r'^version = "(.+)"', "pyproject.toml") == cpattn.__version__
    assert first(r"^project\(cpattn VERSION (\S+)", "CMakeLists.txt") == cpattn.__version__


def test_every_export_is_documented():
    assert all(getattr(cpattn, name).__doc__ for name in cpattn.__all__)


@pytest.mark.parametrize(
    "name", [module.name for module in pkgutil.walk_packages(cpattn.__path__, "cpattn.")]
)
def test_docstring_examples_run(name):
    if name == "cpattn.integrations.vllm.backend":  # which derives from classes of vLLM
        pytest.importorskip("vllm", reason="vllm is not installed")
    if not name.endswith(("._core", ".__main__")):
        assert doctest.testmod(importlib.import_module(name)).failed == 0


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/kv_transfer.md",
        "docs/torch_npu.md",
        "docs/torch_operators.md",
        "docs/transformers.md",
    ],
)
def test_examples_of_documents_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / name).read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    try:
        for example in examples:
            exec(compile(example, name, "exec"), names)
    finally:
        sys.modules.pop("torch_npu", None)  # which one of them installs for good


def test_distributed_is_imported_when_asked_for():
    pytest.importorskip("torch")
    code = (
        "import sys, cpattn; assert 'torch' not in sys.modules; cpattn.distributed.ContextParallel"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nonsense"):
        cpattn.nonsense  # noqa: B018
