# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts that draw pictures of the documents."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def write_pictures(
    folder: Path, pictures: Mapping[str, Callable[[], str]], *, script: str, purpose: str | None
) -> int:
    """Write those that are not what they should be; with --check, name them and return 1."""
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if out of date")
    check = parser.parse_args().check
    stale = []
    for name, draw in pictures.items():
        path, drawn = folder / f"{name}.svg", draw()
        if path.exists() and path.read_text() == drawn:
            continue
        stale.append(path.name)
        if not check:
            folder.mkdir(exist_ok=True)
            path.write_text(drawn)
    if stale and check:
        print(f"{', '.join(stale)}: out of date; run python scripts/{script}.py")
        return 1
    return 0
