# SPDX-License-Identifier: Apache-2.0
"""Name of the machine on which figures were measured."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the model of the processor, or its architecture if the system names no model."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
