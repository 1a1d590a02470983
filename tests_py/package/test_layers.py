# SPDX-License-Identifier: Apache-2.0
"""Modules import only what they may, as the sources show; folders and files of tests are small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from module_imports import names_in

from support.places import ROOT, TESTS

PYTHON = ROOT / "python"
PACKAGES = ("cpattn", "cpattn_lab", "cpattn_proof", "cpattn_terminal")

# Modules may import these packages at their top, which is when `import cpattn` runs or a part of
# the package is asked for. Everything else is imported inside the function that needs it.
MAY_IMPORT = {
    "cpattn/distributed": {"numpy", "torch"},
    "cpattn/doctor/command": {"click"},
    "cpattn/doctor/bind_command": {"click"},
    "cpattn/integrations": {"numpy", "sglang", "torch", "vllm"},
    "cpattn_lab/check": {"numpy", "torch"},
    "cpattn_lab/commands": {"click"},
    "cpattn_lab/cost_model": {"numpy", "rich"},
    "cpattn_lab/replay": {"jinja2", "matplotlib", "numpy", "rich", "torch"},
    "cpattn_proof/commands": {"click"},
    "cpattn_proof/conformance/selection/cases": {"hypothesis", "numpy"},
    "cpattn_proof/conformance/strategies": {"hypothesis"},  # strategies are built from it
    "cpattn_proof/conformance/trials": {"hypothesis", "numpy"},
    "cpattn_proof/page/html": {"jinja2"},
    # Its classes derive from process groups, works and modes of torch.
    "cpattn_proof/simulation": {"numpy", "torch"},
    "cpattn_terminal": {"click", "rich"},
}

# Modules with these prefixes may know these other packages; `cpattn_lab` may know all.
MAY_KNOW = {
    "cpattn.__main__": {"cpattn_terminal"},
    "cpattn.doctor.command": {"cpattn_terminal"},
    "cpattn.doctor.bind_command": {"cpattn_terminal"},
    "cpattn_proof": {"cpattn_terminal"},
    # Two have `cpattn` make plans again, and one builds operators from those of `cpattn`.
    "cpattn_proof.captures.remade": {"cpattn"},
    "cpattn_proof.simulation.remade": {"cpattn"},
    "cpattn_proof.zoo.conform": {"cpattn"},
}

# Each room of the ranks' calls may know these rooms besides itself.
DISTRIBUTED = {
    "transport": set(),
    "plans": {"transport"},
    "layers": {"plans", "transport"},
    "sparse": {"layers", "plans", "transport"},
}


def imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Yield absolute names that importing the module imports, conditional imports included."""
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


def test_python_imports():
    wrong = {}
    for path in PYTHON.rglob("*.py"):
        module = path.relative_to(PYTHON).with_suffix("")
        tops = {name.split(".")[0] for name in imports_at_top(ast.parse(path.read_text()))}
        rooms = [str(module), *map(str, module.parents)]
        allowed = next((MAY_IMPORT[room] for room in rooms if room in MAY_IMPORT), {"numpy"})
        allowed = allowed | set(PACKAGES)  # test_packages_know_what_is_below_them checks these
        wrong[str(module)] = tops - set(sys.stdlib_module_names) - allowed
    assert {module: names for module, names in wrong.items() if names} == {}


def imported_names(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Yield all that a file of a package imports anywhere in it, relative names resolved."""
    parts = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        yield from names_in(node, parts)


def imports_of_modules(root: Path) -> dict[str, set[str]]:
    """Return for every module of the packages in a folder the others that it names.

    Imports inside functions and those for type checkers count, as the module knows the other one
    just as well. Packages around a module do not count: they run first, whatever it imports.
    """
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {"cpattn._core": set(), **{module: set() for module in modules}}
    for module, path in modules.items():
        for name in imported_names(path, root):  # names a module, or something in one
            known = [n for n in (".".join(name), ".".join(name[:-1])) if n in graph]
            graph[module].update(known[:1])
    return graph


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return imports_of_modules(PYTHON)


def test_rooms_of_ranks_stand_on_each_other(graph):
    """Modules beside the rooms may know all of the rooms, and no room knows such a module."""
    room_of = {
        module: module.split(".")[2] if module.count(".") > 2 else ""
        for module in graph
        if module.startswith("cpattn.distributed.")
    }
    for module, room in room_of.items():
        known = {room_of[other] for other in graph[module] if other in room_of}
        assert not room or known <= DISTRIBUTED[room] | {room}, module
    assert set(room_of.values()) - {""} == set(DISTRIBUTED)


def upward_imports(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    return {
        (module, other)
        for module, others in graph.items()
        for other in others
        if module.startswith(f"{other}.")
    }


def circle_in(graph: dict[str, set[str]]) -> tuple[str, ...]:
    """Return modules that import each other in turn, or none if an order of them exists."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def test_no_import_runs_back_up_or_in_a_circle(graph):
    """A package imports its modules; if these imported it, its names would be half-made."""
    assert upward_imports(graph) == set()
    assert circle_in(graph) == ()


@pytest.fixture
def small_package(tmp_path):
    """Return a function that writes modules of a package, and returns what they import."""

    def write(**modules: str) -> dict[str, set[str]]:
        for name, text in modules.items():
            path = tmp_path.joinpath("cpattn", *name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return imports_of_modules(tmp_path)

    (tmp_path / "cpattn" / "kv").mkdir(parents=True)
    (tmp_path / "cpattn" / "__init__.py").write_text("from .kv import pool\n")
    (tmp_path / "cpattn" / "kv" / "__init__.py").write_text("from .pools import pool\n")
    return write


def test_an_import_that_runs_back_up_or_in_a_circle_is_found(small_package):
    for line, package in (
        ("import cpattn", "cpattn"),
        ("from .. import plan", "cpattn"),
        ("from cpattn import plan", "cpattn"),
        ("def f():\n    from . import pool", "cpattn.kv"),
    ):
        graph = small_package(kv__pools=line, plan_of="")
        assert upward_imports(graph) == {("cpattn.kv.pools", package)}
    for line in (
        "from ..cli import main",
        "def f():\n    from .. import cli",
        "if TYPE_CHECKING:\n    from cpattn.cli import main",
    ):
        graph = small_package(kv__pools=line, cli="from .kv.pools import pool\n")
        assert set(circle_in(graph)) == {"cpattn.kv.pools", "cpattn.cli"}
    assert circle_in(small_package(kv__pools="pool = 1")) == ()


def strangers(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return imports from packages that the importing module may not know."""

    def is_in(module: str, prefix: str) -> bool:
        return module == prefix or module.startswith(f"{prefix}.")

    found = set()
    for module, others in graph.items():
        package = module.partition(".")[0]
        known = {package}.union(*(MAY_KNOW[where] for where in MAY_KNOW if is_in(module, where)))
        if package != "cpattn_lab":
            found |= {(module, other) for other in others if other.partition(".")[0] not in known}
    return found


def test_packages_know_what_is_below_them(graph):
    """`cpattn_terminal` is below all, then come `cpattn` and `cpattn_proof`, then `cpattn_lab`."""
    assert {module.partition(".")[0] for module in graph} == set(PACKAGES)
    assert strangers(graph) == set()
    wrong = {("cpattn.kv", "cpattn_terminal.tables"), ("cpattn_proof.zoo.lint", "cpattn.kv")}
    assert strangers({module: {other} for module, other in wrong}) == wrong


def test_integrations_do_not_know_each_other(graph):
    """They may know a part that several share, whose name is private."""
    prefix = "cpattn.integrations."
    part_of = {x: x.removeprefix(prefix).split(".")[0] for x in graph if x.startswith(prefix)}
    for module, part in part_of.items():
        known = {part_of[other] for other in graph[module] if other in part_of}
        assert {name for name in known if not name.startswith("_")} <= {part}, module
    assert {"sglang", "torch_ops", "vllm"} <= set(part_of.values())


MOST_FILES = 20
MOST_LINES = 400  # test_cpp_layers.py has the limit for C++

FILES = [path for path in TESTS.rglob("*.py") if "corpus" not in path.parts]
FOLDERS = sorted({path.parent for path in FILES})


def complaints(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.py"))
    found = [f"{len(files)} files"] if len(files) > MOST_FILES else []
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    return found + [f"{name}: {n} lines" for name, n in lengths.items() if n > MOST_LINES]


def test_a_folder_and_its_files_are_small():
    found = {str(folder): complaints(folder) for folder in FOLDERS}
    assert {folder: lines for folder, lines in found.items() if lines} == {}


def test_tests_are_in_folders_and_import_no_other_test():
    assert {path.name for path in TESTS.glob("*.py")} == {"conftest.py"}
    importing = [
        path.name
        for path in FILES
        for line in path.read_text().splitlines()
        if line.startswith(("from test_", "import test_"))
    ]
    assert importing == []
