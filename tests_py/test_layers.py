# SPDX-License-Identifier: Apache-2.0
"""Which module may import which, read from the sources."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "cpattn"

# Imports outside the standard library at the top of a module, so at `import cpattn` or when a part
# of the package is asked for. Everything else is imported inside the function that needs it.
MAY_IMPORT = {
    "_command_group": {"click"},
    "_options": {"click"},
    "_tables": {"rich"},
    "_torch_library": {"torch"},
    "commands": {"click"},
    "cost_model": {"numpy", "rich"},
    "distributed": {"numpy", "torch"},
    "integrations": {"numpy", "torch", "vllm"},
    "replay": {"cpattn", "jinja2", "matplotlib", "numpy", "rich", "torch"},
}

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Absolute modules imported when the module is, conditional imports included."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        match pending.pop():
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If(body=body) | ast.With(body=body) | ast.ClassDef(body=body):
                pending += body
            case ast.Try(body=body, handlers=handlers):
                pending += body + [line for handler in handlers for line in handler.body]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=name_of)
def test_python_imports(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    tops = {module.split(".")[0] for module in imports_at_top(ast.parse(path.read_text()))}
    allowed = MAY_IMPORT.get(part, {"numpy"})
    assert tops - set(sys.stdlib_module_names) <= allowed


def imported_names(path: Path) -> Iterator[tuple[str, ...]]:
    """All that a file imports, anywhere in it, relative names resolved."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            module = tuple(node.module.split(".")) if node.module else ()
            yield from ((*start, *module, alias.name) for alias in node.names)


def integrations_known_to(path: Path) -> set[str]:
    """The modules and packages next to its own that it imports."""
    folder = PACKAGE / "integrations"
    own = path.relative_to(folder).parts[0].removesuffix(".py")
    others = {entry.stem for entry in folder.iterdir()} - {"__init__", "__pycache__", own}
    prefix = ("cpattn", "integrations")
    return others & {name[2] for name in imported_names(path) if name[:2] == prefix and name[2:]}


def test_integrations_do_not_know_each_other():
    paths = list((PACKAGE / "integrations").rglob("*.py"))
    assert {path: known for path in paths if (known := integrations_known_to(path))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from ..torch_ops import define",
        "from .. import torch_ops",
        "from ...integrations.torch_ops import define",
        "import cpattn.integrations.torch_ops",
    ],
)
def test_an_integration_that_knows_another_is_found(tmp_path, monkeypatch, line):
    folder = tmp_path / "cpattn" / "integrations"
    (folder / "vllm").mkdir(parents=True)
    (folder / "torch_ops.py").touch()
    (folder / "vllm" / "backend.py").write_text(f"from .cache import x\n\ndef f():\n    {line}\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "cpattn")
    assert integrations_known_to(folder / "vllm" / "backend.py") == {"torch_ops"}
