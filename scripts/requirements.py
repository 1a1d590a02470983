# SPDX-License-Identifier: Apache-2.0
"""Prints what pip must install to build the package and to have the named extras.

A name is that of an extra of cpattn, or of another distribution of this repository: `cpattn-lab`.
`pip install '.[test]'` would build the package as well; this is for builds with CMake alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
#: The pyproject.toml of each distribution.
FILES = {
    "cpattn": ROOT / "pyproject.toml",
    "cpattn-lab": ROOT / "python/distributions/cpattn-lab/pyproject.toml",
    "cpattn-proof": ROOT / "python/distributions/cpattn-proof/pyproject.toml",
}


def pyproject(name: str) -> dict[str, Any]:
    """Return the pyproject.toml of a distribution."""
    return tomllib.loads(FILES[name].read_text(encoding="utf-8"))


def resolved(requirement: str) -> Iterator[str]:
    """Replace a requirement of a distribution of this repository by what that one requires."""
    match = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?(?:==[\d.]+)?", requirement)
    if match is None or match[1] not in FILES:
        yield requirement
        return
    metadata = pyproject(match[1])["project"]
    lists = [metadata["dependencies"]]
    lists += [
        metadata["optional-dependencies"][name] for name in (match[2] or "").split(",") if name
    ]
    for line in (line for lines in lists for line in lines):
        yield from resolved(line)


def extra(name: str) -> list[str]:
    """Return all requirements of an extra of cpattn, each once."""
    return list(dict.fromkeys(resolved(f"cpattn[{name}]")))


if __name__ == "__main__":
    config = pyproject("cpattn")
    names = [name if name in FILES else f"cpattn[{name}]" for name in sys.argv[1:]]
    found = [line for name in ["cpattn", *names] for line in resolved(name)]
    print(*dict.fromkeys([*config["build-system"]["requires"], *found]), sep="\n")
