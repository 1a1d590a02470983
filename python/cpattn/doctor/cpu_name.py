# SPDX-License-Identifier: Apache-2.0
"""Name of the machine on which figures were measured."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Return the model of the processor, or its architecture if the system names no model.

    Hypervisors may name no number, as "AMD EPYC": then family and model say which one it is.
    """
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    name, family, model = (
        re.search(rf"^{fact}\s*: (.*)$", text, re.MULTILINE)
        for fact in ("model name", "cpu family", "model")
    )
    if name is None:
        return platform.machine()
    if family is None or model is None or re.search(r"\d", name[1]):
        return name[1]
    return f"{name[1]} family {family[1]} model {model[1]}"
