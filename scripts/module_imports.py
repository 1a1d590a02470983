# SPDX-License-Identifier: Apache-2.0
"""What an import statement names."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def names_in(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The names that a statement of a module in `package` imports, absolute, by their parts."""
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = package[: len(package) + 1 - node.level] if node.level else ()
        module = tuple(node.module.split(".")) if node.module else ()
        yield from ((*start, *module, alias.name) for alias in node.names)
