# SPDX-License-Identifier: Apache-2.0
"""Reads from wheels of torch whether they have the private names that `cpattn simulate` needs.

    python scripts/torch_releases.py WHEEL... > tests_py/proof/simulation/torch_releases.toml

A wheel is a file or an address of one; of the latter a few files are fetched, not the whole.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import urllib.request
import zipfile
from typing import Any

from cpattn_proof.simulation.process.torch_names import NEEDED, OPTIONAL

C10D = "torch/distributed/distributed_c10d.py"
# Compiled modules are read in the stubs and the Python code that use them.
COMPILED = {
    "torch._C": ("torch/_C/__init__.pyi",),
    "torch._C._distributed_c10d": (
        "torch/_C/_distributed_c10d.pyi",
        "torch/testing/_internal/common_distributed.py",
    ),
}
GROUPS = ("default_pg", "group", "group_to_use", "pg", "pg_to_shutdown")


class Remote(io.RawIOBase):
    """A file of a server, of which ranges are fetched."""

    def __init__(self, address: str) -> None:
        self._address, self._at = address, 0
        self._size = int(self._fetch(0, 0)[1].rpartition("/")[2])

    def _fetch(self, first: int, last: int) -> tuple[bytes, str]:
        ranges = {"Range": f"bytes={first}-{last}"}
        with urllib.request.urlopen(urllib.request.Request(self._address, headers=ranges)) as got:
            if got.status != 206:
                raise OSError(f"{self._address}: the server gives no ranges")
            return got.read(), got.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        if size > 0:
            buffer[:size] = self._fetch(self._at, self._at + size - 1)[0]
            self._at += size
        return max(size, 0)


def files_of(wheel: zipfile.ZipFile, module: str) -> tuple[str, ...]:
    if module in COMPILED:
        return COMPILED[module]
    path = module.replace(".", "/")
    return (f"{path}.py",) if f"{path}.py" in wheel.namelist() else (f"{path}/__init__.py",)


def names_in(path: str, text: str) -> set[str]:
    """Names that a module defines or imports; of stubs and tests all words."""
    if any(path in paths for paths in COMPILED.values()):
        return set(re.findall(r"\w+", text))
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def absent(wheel: zipfile.ZipFile) -> list[str]:
    """Those of the names that the wheel has not."""
    lacking = []
    for module, name in looked_for():
        paths = files_of(wheel, module)
        if not any(name in names_in(path, wheel.read(path).decode()) for path in paths):
            lacking.append(f"{module}.{name}")
    return lacking


def looked_for() -> list[tuple[str, str]]:
    return [
        (m, name) for table in (NEEDED, OPTIONAL) for m, names in table.items() for name in names
    ]


def main() -> None:
    print("# Written by scripts/torch_releases.py from the released wheels.")
    print("[looked_for]")
    for module in NEEDED | OPTIONAL:
        names = [*NEEDED.get(module, ()), *OPTIONAL.get(module, ())]
        print(f"{module!r} = {names}".replace("'", '"'))
    for place in sys.argv[1:]:
        is_remote = place.startswith(("http:", "https:"))
        file: Any = io.BufferedReader(Remote(place), 1 << 18) if is_remote else place
        with zipfile.ZipFile(file) as wheel:
            calls = [
                node for node in ast.walk(ast.parse(wheel.read(C10D))) if isinstance(node, ast.Call)
            ]
            makers = [c for c in calls if getattr(c.func, "id", "") == "_new_process_group_helper"]
            methods = {
                call.func.attr
                for call in calls
                if isinstance(call.func, ast.Attribute)
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id in GROUPS
            }
            print(f'\n["{re.search(r"torch-([0-9.]+)", place)[1]}"]')
            print(f"absent = {absent(wheel)}".replace("'", '"'))
            keywords = sorted({str(key.arg) for call in makers for key in call.keywords})
            print(f"options_of_groups = {keywords}".replace("'", '"'))
            print(f"methods_of_groups = {sorted(methods)}".replace("'", '"'))


if __name__ == "__main__":
    main()
