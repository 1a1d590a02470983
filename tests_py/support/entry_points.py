# SPDX-License-Identifier: Apache-2.0
"""Entry points of the uninstalled project, for processes that look for plug-ins."""

import sys
from pathlib import Path

from support.places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = ROOT / "pyproject.toml"


def write_distribution(folder: Path) -> Path:
    """Make the .dist-info of an installation in `folder`, which goes onto PYTHONPATH."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    distribution = folder / f"{project['name']}-{project['version']}.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (distribution / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return distribution
