# SPDX-License-Identifier: Apache-2.0
"""The machine that figures were taken on."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """The model of the processor; its architecture where the system does not name one."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
