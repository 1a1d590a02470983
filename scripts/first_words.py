# SPDX-License-Identifier: Apache-2.0
"""Finds docstrings, help texts and comments that begin with a word of first_words.toml.

It exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ROOMS = ("python", "cpp", "tests_py")
RULES = Path(__file__).with_suffix(".toml")
_OPTIONS = ("option", "of_model", "_of_rank")  # names, default, help, ...
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, assigned to ``__doc__`` or not, and of help texts."""
    for node in ast.walk(ast.parse(source)):
        value = help_of(node) if isinstance(node, ast.Call) else None
        if isinstance(node, _DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "__doc__":
            value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


def help_of(call: ast.Call) -> ast.expr | None:
    """Return the help text of an option of a command, or None."""
    if getattr(call.func, "id", "") in _OPTIONS:
        return call.args[2]
    return next((given.value for given in call.keywords if given.arg == "help"), None)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of the first line of each block of ``///``."""
    is_inside = False
    for number, line in enumerate(source.splitlines(), start=1):
        comment = re.match(r"\s*///(?!/)(.*)", line)
        if comment and not is_inside:
            yield number, comment[1]
        is_inside = comment is not None


def faults(root: Path, rules: Mapping[str, Any]) -> list[str]:
    """Describe beginnings that the rules forbid."""
    words = "|".join(map(re.escape, rules["words"]))
    allowed = "|".join([*map(re.escape, rules["allowed"]), "(?!)"])
    forbidden = re.compile(rf"(?!(?:{allowed})\b)({words})(?![\w-])", re.IGNORECASE)
    found = []
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*")):
        if path.suffix not in (".py", ".h", ".cc"):
            continue
        name = path.relative_to(root)
        pieces = docstrings if path.suffix == ".py" else comments
        for line, text in pieces(path.read_text(encoding="utf-8")):
            text = " ".join(text.split())
            if word := forbidden.match(text):
                found.append(f"{name}:{line}: begins with {word[1]!r}: {text:.70}")
    return found


def main() -> int:
    found = faults(ROOT, tomllib.loads(RULES.read_text(encoding="utf-8")))
    print("\n".join(found) or "first words: as first_words.toml says")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
