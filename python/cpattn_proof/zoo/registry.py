# SPDX-License-Identifier: Apache-2.0
"""Registry of the zoo: finds the bugs in all modules in the folders of the tools."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from .entry import TOOLS, ZooEntry


def all_entries(tools: Sequence[str] = TOOLS) -> tuple[ZooEntry, ...]:
    """Collect ``ENTRIES`` of the modules in the folders of tools beside this one.

    Only these modules are imported: those of ``lint`` need neither torch nor hypothesis. A tool
    without a folder has no entries; two entries with the same name and tool are refused.
    """
    entries: list[ZooEntry] = []
    for tool in tools:
        folder = Path(__file__).parent / tool
        for name in sorted(module.name for module in pkgutil.iter_modules([str(folder)])):
            module = importlib.import_module(f"{__package__}.{tool}.{name}")
            entries += getattr(module, "ENTRIES", ())
    names = [f"{entry.bug} ({entry.tool})" for entry in entries]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"all_entries: a bug is in the zoo once for each tool, got {', '.join(twice)} again"
        )
    return tuple(entries)
