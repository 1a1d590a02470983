# SPDX-License-Identifier: Apache-2.0
"""Prints what pip must install to build the package and to have its named extras.

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


def extra(project: dict[str, Any], name: str) -> Iterator[str]:
    """The requirements of one extra, with those of the project's own extras it asks for."""
    for requirement in project["optional-dependencies"][name]:
        own = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", requirement)
        if own:
            for other in own[1].split(","):
                yield from extra(project, other)
        else:
            yield requirement


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    config = tomllib.loads(text)
    print(*config["build-system"]["requires"], *config["project"]["dependencies"], sep="\n")
    for name in sys.argv[1:]:
        print(*extra(config["project"], name), sep="\n")
